"""Reading a model's keys of contrastive examples, and what their covariances say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radar_core.hooks.attachment import attach
from radar_core.hooks.keys import Site, key_sites, shape_of
from radar_core.hooks.parts import Parts, decoder
from radar_core.methods.method import Layers, NoSteering, check_indices, resolve
from radar_core.methods.projections import Projections, Subspace

if TYPE_CHECKING:
    from radar_core.methods.seka import Contrast

# A progress bar is shown after this many seconds.
_PATIENCE = 2.0


@torch.no_grad()
def collect(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Contrast],
    layers: Layers,
    chat: bool,
    progress: bool,
) -> Projections:
    """See `radar_core.methods.seka.learn`."""
    from tqdm import tqdm

    with attach(model, NoSteering()):  # holds the model, and refuses what cannot be steered
        pass
    shape = shape_of(model)
    check_indices("layers", layers)
    chosen = (
        range(shape.num_layers)
        if layers is None
        else sorted(resolve("layers", layers, shape.num_layers))
    )
    sites = key_sites(Parts.of(model), tuple(chosen))
    texts = [_texts(tokenizer, example, place, chat) for place, example in enumerate(examples)]
    sums = _Sums(len(sites), shape.key_heads, shape.head_size)
    bar = tqdm(texts, "reading keys", unit="example", delay=_PATIENCE, disable=not progress)
    for prompts in bar:
        sums.add(*(_read(model, sites, ids, places) for ids, places in prompts))
    decomposed = tqdm(
        sums.covariances().items(),
        "decomposing",
        unit="covariance",
        delay=_PATIENCE,
        disable=not progress,
    )
    subspaces = {name: _subspace(matrix, sums.mean) for name, matrix in decomposed}
    return Projections(
        model_type=shape.model_type,
        num_layers=shape.num_layers,
        layers=tuple(sites),
        tokens=sums.tokens,
        **subspaces,
        mean_distance=(sums.distance / sums.tokens).float(),
        frobenius_distance=(sums.squares.sqrt() / sums.tokens).float(),
    )


class _Sums:
    """What is added up over the answer tokens of all examples, in float64.

    Args:
        layers: number of layers.
        heads: number of key heads.
        size: length of one head.
    """

    def __init__(self, layers: int, heads: int, size: int) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(layers, heads, *shape, dtype=torch.float64)

        self.positive, self.negative = zeros(size, size), zeros(size, size)
        self.mean, self.distance, self.squares = zeros(size), zeros(), zeros()
        self.tokens = 0

    def add(self, neutral: Tensor, relevant: Tensor, irrelevant: Tensor) -> None:
        """Add one example's keys, each float64 [layers, heads, n, size]."""
        self.positive += neutral.mT @ relevant
        self.negative += neutral.mT @ irrelevant
        self.mean += relevant.sum(2)
        moved = (relevant - irrelevant).norm(dim=-1)
        self.distance += moved.sum(2)
        self.squares += moved.square().sum(2)
        self.tokens += neutral.shape[2]

    def covariances(self) -> dict[str, Tensor]:
        """Return the three cross-covariances: float64 [layers, heads, size, size]."""
        positive, negative = self.positive / self.tokens, self.negative / self.tokens
        return {"positive": positive, "negative": negative, "difference": positive - negative}


def _subspace(matrix: Tensor, mean: Tensor) -> Subspace:
    vectors, values, _ = torch.linalg.svd(matrix)
    along = torch.einsum("lhd,lhdr->lhr", mean, vectors)
    turned = vectors * torch.where(along < 0, -1.0, 1.0)[:, :, None]
    return Subspace(turned.float().contiguous(), values.float().contiguous())


def _texts(
    tokenizer: Any, example: Contrast, place: int, chat: bool
) -> list[tuple[Tensor, Tensor]]:
    """Return an example's three prompts: ids [1, n], and where the answer's tokens are.

    Raises:
        ValueError: the answer is not exactly once in the context, or reads as other tokens.
    """
    count = example.context.count(example.answer) if example.answer else 0
    if count != 1:
        raise ValueError(
            f"the answer {example.answer!r} of examples[{place}] is {count} times in its context; "
            "expected it once"
        )
    context = f"Context: {example.context}"
    prompts = []
    for question in (None, example.relevant, example.irrelevant):
        text = context if question is None else f"Question: {question}\n{context}"
        prompts.append(_tokens(tokenizer, text, example, chat))
    answers = [ids[0, places].tolist() for ids, places in prompts]
    if not answers[0] or answers[1] != answers[0] or answers[2] != answers[0]:
        raise ValueError(
            f"the answer {example.answer!r} of examples[{place}] reads as the tokens {answers}; "
            "expected the same ones behind every question"
        )
    return prompts


def _tokens(tokenizer: Any, text: str, example: Contrast, chat: bool) -> tuple[Tensor, Tensor]:
    """Return a prompt's ids [1, n] and the places of the answer's tokens.

    Args:
        tokenizer: a fast tokenizer.
        text: ends with the example's context.
        example: where the text is from.
        chat: whether to put it into the chat template.
    """
    start = len(text) - len(example.context) + example.context.index(example.answer)
    end = start + len(example.answer)
    whole = text
    if chat:
        message = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(message, tokenize=False)
        shift = whole.rindex(text)
        start, end = start + shift, end + shift
    encoded = tokenizer(whole, return_offsets_mapping=True, add_special_tokens=not chat)
    offsets = encoded["offset_mapping"]
    places = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
    return torch.tensor([encoded["input_ids"]]), torch.tensor(places)


def _read(model: Any, sites: dict[int, Site], ids: Tensor, places: Tensor) -> Tensor:
    """Return the keys of some tokens: float64 [layers, heads, n, size]."""
    with _listening(sites, places) as found:
        decoder(model)(ids.to(model.device), use_cache=False)
    missing = sorted(sites.keys() - found.keys())
    if missing:
        raise ValueError(
            f"the keys of layers {missing} of {type(model).__name__} were never reached; this "
            "model's keys cannot be learned from"
        )
    return torch.stack([found[layer] for layer in sites])


@contextmanager
def _listening(sites: dict[int, Site], places: Tensor) -> Iterator[dict[int, Tensor]]:
    """Note the keys of some tokens, of one row, that come out of the sites."""
    found: dict[int, Tensor] = {}
    handles = []

    def listen(layer: int, one: Site) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            keys = one.states(output, args[0])[0]
            found[layer] = keys[:, places.to(keys.device)].to("cpu", torch.float64)

        return hook

    try:
        for layer, one in sites.items():
            handles.append(one.module.register_forward_hook(listen(layer, one)))
        yield found
    finally:
        for handle in handles:
            handle.remove()
