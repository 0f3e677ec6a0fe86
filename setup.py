"""Builds the C++ operators; an install without them still works, and says why they are absent."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.cpp"))
HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h"))
REASON_FILE = "_cpp_build_error.txt"


def compiler_flags() -> list[str]:
    """Flags of every source; instruction sets are chosen inside the sources, never here."""
    return ["-O3", "-g0", "-fopenmp", "-ffp-contract=fast", "-fvisibility=hidden", "-Wno-psabi"]


def absence() -> str | None:
    """Why no build is tried, or None if one is."""
    if os.environ.get("RADAR_NO_CPP") == "1":
        return "RADAR_NO_CPP=1 was set when radar-kernels was installed"
    if sys.platform == "win32":
        return "the C++ operators need gcc or clang; Windows is not supported"
    try:
        import torch.utils.cpp_extension  # noqa: F401
    except Exception as error:
        return f"torch could not be imported at build time: {error!r}"
    return None


class BuildOrExplain(build_ext):
    """Builds with torch's own command; a failure becomes a file that names the reason."""

    def run(self) -> None:
        reason = absence()
        if reason is None:
            try:
                self._build()
            except (Exception, SystemExit) as error:
                what = " ".join(str(error).rstrip(".").split())
                reason = (
                    f"the C++ build failed ({what}). Install a C++ compiler, such as g++, and "
                    "install Radar again; pip install -v shows the compiler's output"
                )
        self._record(reason)

    def _build(self) -> None:
        from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths

        builder = BuildExtension(self.distribution, no_python_abi_suffix=True)
        for name in ("build_lib", "build_temp", "inplace", "force", "debug", "parallel"):
            setattr(builder, name, getattr(self, name))
        builder.editable_mode = self.editable_mode
        builder.ensure_finalized()
        for extension in builder.extensions:
            extension.include_dirs = include_paths()
            extension.library_dirs = library_paths()
            extension.libraries = ["c10", "torch_cpu"]
            extension.extra_compile_args = compiler_flags()
        builder.run()

    def _record(self, reason: str | None) -> None:
        folders = [Path(self.build_lib) / "radar_kernels"]
        if self.inplace:
            folders.append(ROOT / "radar_kernels")
        for folder in folders:
            path = folder / REASON_FILE
            if reason is None:
                path.unlink(missing_ok=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(reason + "\n", encoding="utf-8")
                for library in folder.glob("_C*.so"):  # of an earlier build
                    library.unlink()
        if reason is not None:
            print(f"radar-kernels: installing without C++ operators: {reason}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {
            built: source
            for built, source in super().get_output_mapping().items()
            if Path(built).exists()
        }


setup(
    ext_modules=[Extension("radar_kernels._C", sources=SOURCES, depends=HEADERS, language="c++")],
    cmdclass={"build_ext": BuildOrExplain},
)
