"""Scripted agents that ask for decisions: the scenarios of the experiment `dacs`.

Each agent reports what it found out and asks a question whose answer lies in its own report and
nowhere else, and not in the question: an answer with one of its keywords was made from the right
agent's context. No agent's keywords or name occur in another agent's texts, so that a keyword or
name of another agent in an answer was taken from its context. Every scenario is checked for all
that when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from radar_core.policies.dacs.metrics import Decision
from radar_core.policies.dacs.registry import Urgency

__all__ = ["SCENARIOS", "Scenario", "ScriptedAgent", "Step"]


@dataclass(frozen=True)
class Step:
    """What an agent does next.

    Args:
        summary: what it tells the registry.
        output: what it has found out, for its own focus context.
        question: what it asks; None if it just goes on.
        keywords: what a right answer has to contain, any one of them.
        urgency: of the question.
    """

    summary: str
    output: str
    question: str | None = None
    keywords: tuple[str, ...] = ()
    urgency: Urgency = Urgency.MEDIUM


@dataclass(frozen=True)
class ScriptedAgent:
    """An agent that follows a script.

    Args:
        agent_id: its name.
        task: what it does.
        steps: its script.
    """

    agent_id: str
    task: str
    steps: tuple[Step, ...]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Its decision points, in order."""
        return tuple(
            Decision(step.question, step.keywords)
            for step in self.steps
            if step.question is not None
        )

    @property
    def texts(self) -> Iterator[str]:
        """Everything it says."""
        yield self.task
        for step in self.steps:
            yield from (step.summary, step.output, step.question or "")


@dataclass(frozen=True)
class Scenario:
    """Agents that work at the same time.

    Args:
        name: of the scenario.
        about: what is special about it, in a few words.
        agents: the agents.

    Raises:
        ValueError: a question contains its answer, an answer is not to be found in the agent's own
            context, or an agent's texts contain another agent's name or keywords.
    """

    name: str
    about: str
    agents: tuple[ScriptedAgent, ...] = field(repr=False)

    def __post_init__(self) -> None:
        names = [agent.agent_id for agent in self.agents]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name}: two agents have the same name: {', '.join(names)}")
        for agent in self.agents:
            for step in agent.steps:
                self._check_step(agent, step)

    @property
    def decisions(self) -> dict[str, tuple[Decision, ...]]:
        """Every agent's decision points."""
        return {agent.agent_id: agent.decisions for agent in self.agents}

    def _check_step(self, agent: ScriptedAgent, step: Step) -> None:
        place = f"{self.name}, {agent.agent_id}, {step.question or step.summary!r}"
        if step.question is None:
            if step.keywords:
                raise ValueError(f"{place}: keywords without a question")
            return
        if not step.keywords:
            raise ValueError(f"{place}: a question without keywords")
        known = f"{agent.task}\n{step.output}".lower()
        if not any(word.lower() in known for word in step.keywords):
            raise ValueError(f"{place}: none of {step.keywords} is in the agent's context")
        asked = f"{step.question}\n{agent.agent_id}".lower()
        for word in step.keywords:
            if word.lower() in asked:
                raise ValueError(f"{place}: the question contains its answer {word!r}")
        for other in self.agents:
            if other is agent:
                continue
            said = "\n".join((other.agent_id, *other.texts)).lower()
            for word in (*step.keywords, agent.agent_id):
                if word.lower() in said:
                    raise ValueError(f"{place}: {other.agent_id!r} says {word!r} too")


def _step(
    summary: str, output: str, question: str, *keywords: str, urgency: Urgency = Urgency.MEDIUM
) -> Step:
    return Step(summary, output, question, keywords, urgency)


def _agent(agent_id: str, task: str, *steps: Step) -> ScriptedAgent:
    return ScriptedAgent(agent_id, task, steps)


_MUSEUM = Scenario(
    "museum_n3",
    "three unlike tasks",
    (
        _agent(
            "lighting-team",
            "Set up the lamps for the room of watercolours before the opening.",
            _step(
                "Measured two lamp types over the long wall.",
                "The halogen lamps gave 180 lux on the paper and bleached the test strip in a "
                "week. The sodium lamps turned the blues grey. The fibre-optic lamps stayed at "
                "45 lux and left the strip unchanged. All three fit the rail.",
                "Which lamps should I mount on the rail?",
                "fibre-optic",
                "fiber-optic",
                "fibre optic",
            ),
            _step(
                "Lamps are mounted; working on the timer.",
                "Visitors come from ten to six. The conservator allows 2,600 lux hours a week on "
                "paper. At the measured level eight hours a day for seven days stay under it, "
                "but only if the lamps are off during the cleaners' shift, which starts at 19:15.",
                "At what time do the lamps have to be off in the evening at the latest?",
                "19:15",
                "7:15",
            ),
            _step(
                "Timer is programmed; last check of the corner cabinet.",
                "The corner cabinet gets sun from the west window after three. The linen blind was "
                "still too bright. The mesh blind let through a fifth. The blackout blind of felt "
                "took the cabinet to the same level as the wall.",
                "Which blind should go on the west window?",
                "felt",
                "blackout",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "loans-clerk",
            "Clear the papers for the paintings that other museums lend for the show.",
            _step(
                "Read the contracts of two lenders.",
                "The lender in Ghent asks for a courier who stays in the room while the crate is "
                "opened. The lender in Porto asks for nothing but a receipt. Our courier budget "
                "covers one trip. The contract with Ghent ends the loan if its wish is not met.",
                "For which lender should I book the courier?",
                "ghent",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Courier is booked; insurance is next.",
                "Three offers came in. Alderman covers transport alone. Brightwater covers "
                "transport and hanging but not flood, which both contracts demand. Corvane covers "
                "transport, hanging and flood, for four hundred more.",
                "Which insurer should I sign with?",
                "corvane",
            ),
            _step(
                "Insurance is signed; customs is the last point.",
                "The crate from outside the union may enter on a carnet, which is free of duty for "
                "a year, or on an import form, which costs a tenth of the value and can only be "
                "claimed back after two years. The loan lasts five months.",
                "Which paper should the crate enter on?",
                "carnet",
            ),
        ),
        _agent(
            "voiceover-writer",
            "Write the spoken guide that visitors hear on their own phones.",
            _step(
                "Drafted the first stop in three lengths.",
                "In the trial, people left the two-minute text before its end. The forty-second "
                "text was heard to the end by nine of ten but nobody remembered the painter. The "
                "text of seventy-five seconds was heard out and remembered.",
                "How long should the text of each stop be?",
                "seventy-five",
                "75",
            ),
            _step(
                "Lengths are settled; choosing a narrator.",
                "Odile reads warmly but swallows her endings. Marek reads clearly and needs no "
                "second take. Tamsin is free only after the opening. The studio is ours for one "
                "day.",
                "Whom should I hire as the narrator?",
                "marek",
            ),
            _step(
                "Recording is done; the order of stops is open.",
                "Most people turn right behind the door and reach the harbour scene first. The "
                "plan began with the self-portrait at the far end, and trial groups walked past "
                "everything to get there. The harbour scene also explains the technique.",
                "Which picture should the guide begin with?",
                "harbour",
                "harbor",
                urgency=Urgency.LOW,
            ),
        ),
    ),
)

_GREENHOUSE = Scenario(
    "greenhouse_n3_alike",
    "three tasks alike, with questions that differ in the plant alone",
    (
        _agent(
            "tomato-bay",
            "Run the climate and feeding of the tomato bay.",
            _step(
                "Logged a week of night temperatures.",
                "At 13 degrees the flowers dropped. At 21 degrees the stems grew thin. At 17.5 "
                "degrees the trusses set evenly, and the heating stayed within its allowance.",
                "Which night temperature should I set in this bay?",
                "17.5",
            ),
            _step(
                "Temperature is set; compared three feeds.",
                "The comfrey feed yellowed the lower leaves. The nettle feed brought leaf and no "
                "fruit. The wood-ash feed gave the most fruit per plant in the trial row.",
                "Which feed should I use in this bay?",
                "wood-ash",
                "wood ash",
            ),
            _step(
                "Feed is chosen; whitefly on two rows.",
                "Soap spray marked the fruit. The encarsia wasp cleared the test row within "
                "twelve days and leaves no residue. Yellow cards alone caught too few.",
                "What should I use against the pest in this bay?",
                "encarsia",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "orchid-bay",
            "Run the climate and feeding of the orchid bay.",
            _step(
                "Logged a week of night temperatures.",
                "At 12 degrees the buds stuck. At 24 degrees they opened and fell at once. At 18.8 "
                "degrees the spikes held their buds, though the vents had to close at dusk.",
                "Which night temperature should I set in this bay?",
                "18.8",
            ),
            _step(
                "Temperature is set; compared three feeds.",
                "The kelp feed left a crust on the bark. The guano feed burnt the root tips. The "
                "quarter-strength urea-free feed kept the roots green and the bark clean.",
                "Which feed should I use in this bay?",
                "urea-free",
                "urea free",
            ),
            _step(
                "Feed is chosen; scale insects on the benches.",
                "Rubbing with alcohol took a whole day for one bench. White oil scorched the "
                "petals. The lacewing larvae cleaned the bench beside the door by themselves.",
                "What should I use against the pest in this bay?",
                "lacewing",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "fern-bay",
            "Run the climate and feeding of the fern bay.",
            _step(
                "Logged a week of night temperatures.",
                "At 9 degrees the fronds browned. At 20 degrees the fog nozzles ran without end. "
                "At 14.2 degrees new fronds uncurled and the nozzles rested half the night.",
                "Which night temperature should I set in this bay?",
                "14.2",
            ),
            _step(
                "Temperature is set; compared three feeds.",
                "The fish emulsion drew flies. The bone meal did nothing in a month. The "
                "leaf-mould tea darkened the fronds within two weeks and smells of nothing.",
                "Which feed should I use in this bay?",
                "leaf-mould",
                "leaf mould",
                "leaf-mold",
            ),
            _step(
                "Feed is chosen; weevil grubs in the pots.",
                "Repotting lost a third of the plants. Garlic water had no effect. The "
                "nematodes emptied the pots of grubs in one watering and harm nothing else.",
                "What should I use against the pest in this bay?",
                "nematode",
                urgency=Urgency.HIGH,
            ),
        ),
    ),
)

_REFIT = Scenario(
    "refit_n3_dense",
    "many decisions an agent, so that histories grow",
    (
        _agent(
            "hull-crew",
            "Repair and paint the hull of the ferry in dry dock.",
            _step(
                "Plates below the waterline are surveyed.",
                "Plate 7 is thin at the edge but within the rule. Plate 31 has lost four "
                "millimetres and weeps. Plate 12 shows surface rust that brushes off.",
                "Which plate do we have to replace?",
                "31",
            ),
            _step(
                "The plate is cut out.",
                "The yard has mild steel of eight millimetres and of ten, and a sheet of corten. "
                "The class society's note for this frame names grade EH36, which the supplier in "
                "town can bring tomorrow.",
                "Which steel grade should I order for the new plate?",
                "eh36",
            ),
            _step(
                "New plate is welded; testing the seams.",
                "The dye test cannot see inside the seam. X-rays need the dock cleared for a night "
                "and the permit is refused. The ultrasonic test finds inner faults and may "
                "be done by day.",
                "Which test should I run on the seams?",
                "ultrasonic",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Seams passed; choosing the bottom paint.",
                "The copper paint is banned in the lake from this year. The silicone paint needs "
                "speeds that the ferry never reaches. The graphene paint passed the harbour's "
                "trial and is in stock.",
                "Which bottom paint should we apply?",
                "graphene",
            ),
        ),
        _agent(
            "diesel-crew",
            "Overhaul the main diesel and its cooling.",
            _step(
                "Compression is measured on all cylinders.",
                "Cylinders one to three are equal. Cylinder five is a little low and "
                "comes back with oil. Cylinder six loses all pressure past its exhaust valve.",
                "Which cylinder should I open first?",
                "six",
            ),
            _step(
                "The head is off.",
                "Grinding the valve seat would take it under its limit of size. Stelliting it "
                "takes a workshop three weeks. A new insert of Nimonic is on the shelf and is "
                "pressed in within a day.",
                "What should I put in to mend the valve seat?",
                "nimonic",
            ),
            _step(
                "Valve seat is done; the pump leaks.",
                "The nitrile seal hardened after one summer. The graphite seal needs a shaft "
                "without scratches, and ours has two. The lip seal of viton runs past the "
                "scratches.",
                "Which seal should the pump get?",
                "viton",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Pump is closed; planning the run-in.",
                "The maker's card for a new insert asks for 900 revolutions during the first "
                "twenty hours. Faster beats the seat out of shape; slower leaves it unseated.",
                "How many revolutions should we run it at during the first hours?",
                "900",
            ),
        ),
        _agent(
            "saloon-crew",
            "Refit the passenger saloon for the summer season.",
            _step(
                "Floor is bare; samples are on the table.",
                "The cork floor swelled in the wet test. The carpet failed the fire class. The "
                "floor of nora rubber passed both and is quiet.",
                "Which floor covering should I lay?",
                "nora",
                "rubber",
            ),
            _step(
                "Floor is ordered; windows are next.",
                "Two panes are blind. Plain glass is not allowed on this deck. Polycarbonate "
                "scratches under the brushes. Laminated panes are allowed and the frame fits them.",
                "Which panes should replace the blind ones?",
                "laminated",
            ),
            _step(
                "Panes are in; seat count is open.",
                "The stability sheet allows 148 seated people in the saloon. The fire plan allows "
                "160 people. The architect drew 172 seats. The lowest limit binds.",
                "How many seats may I install?",
                "148",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Seats are bolted; the colour is missing.",
                "Partially sighted passengers in the trial could not tell the beige seats from "
                "the floor. The navy ones vanished at dusk. The marigold ones were found by all.",
                "Which colour should the covers have?",
                "marigold",
                urgency=Urgency.LOW,
            ),
        ),
    ),
)

_NEWSROOM = Scenario(
    "newsroom_n5",
    "five desks with a deadline, of mixed urgency",
    (
        _agent(
            "sports-desk",
            "Fill the sports page of tomorrow's paper.",
            _step(
                "Three match reports are in.",
                "The rowing report is complete and quotes both crews. The football report waits "
                "for the referee's word, due after midnight. The chess report is only a table.",
                "Which report should lead the page at the deadline of ten?",
                "rowing",
            ),
            _step(
                "Lead is set; a photograph is missing.",
                "Frame 4471 is sharp and shows the finish. Frame 4476 shows a sponsor we may not "
                "print. Frame 4480 is blurred.",
                "Which frame should I print?",
                "4471",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "forecast-desk",
            "Write the weather column of tomorrow's paper.",
            _step(
                "Two models disagree about Sunday.",
                "The coarse model brings sleet for Sunday; it has been wrong on four of five "
                "Sundays. The fine model brings fog until noon and has been right on all five.",
                "What should the column announce for Sunday?",
                "fog",
            ),
            _step(
                "Column is written; a warning may be due.",
                "The river office gives 3.4 metres for the weir at dawn. Its own rule: a "
                "notice at 2.5, a level-amber warning at 3.0, a level-red warning at 4.0.",
                "Which level of warning does the column have to print?",
                "amber",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "courts-desk",
            "Report from the regional court.",
            _step(
                "Verdict in the quarry case is out.",
                "The operator Hesketh was cleared. The surveyor Lindqvist was convicted of false "
                "readings. The ministry was not a party. A headline must name the one convicted.",
                "Whose name should go into the headline?",
                "lindqvist",
            ),
            _step(
                "Headline is set; naming a witness.",
                "The witness asked for no name. The judge's order of 3 May allows the "
                "initial alone. The editor's draft used a first name, which the order forbids.",
                "How may I refer to the witness?",
                "initial",
            ),
        ),
        _agent(
            "markets-desk",
            "Write the business briefs.",
            _step(
                "Half-year numbers of two makers came in.",
                "Tessaly Tools earned less but its order book doubled. Ormond Looms lost its "
                "largest customer and said so on page nine. The readers' list holds Ormond.",
                "Which company should the first brief be about?",
                "ormond",
            ),
            _step(
                "Brief is written; one number is doubtful.",
                "The press note says 18 million. The audited annex says 16.2 million and is "
                "signed. The phone line of the company is closed until Monday.",
                "Which figure in millions should I print?",
                "16.2",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "letters-desk",
            "Choose and edit the readers' letters.",
            _step(
                "Forty letters read, three remain.",
                "The letter on bus fares repeats last week's. The letter on bats in the old mill "
                "is new and has an address. The letter on taxes is unsigned, which rules it out.",
                "Which letter should open the column?",
                "bats",
                urgency=Urgency.LOW,
            ),
            _step(
                "Opening letter is set; it is too long.",
                "The column holds 210 words beside the cartoon and 340 without it. The cartoon "
                "is paid for and stays. The letter has 390 words.",
                "To how many words should I cut it?",
                "210",
            ),
        ),
    ),
)

_EXPEDITION = Scenario(
    "expedition_n5_crossfire",
    "five agents that all are blocked at once",
    (
        _agent(
            "medic-unit",
            "Keep the crew of the ice station healthy.",
            _step(
                "A cook has a swollen hand.",
                "Penicillin is out: the patient's card notes an allergy. Ibuprofen did not lower "
                "the fever. The card permits doxycycline, and the locker holds two courses.",
                "Which drug should I give?",
                "doxycycline",
                urgency=Urgency.HIGH,
            ),
            _step(
                "The hand is better; two cases of frostnip.",
                "The handbook warms frostnip in water of 38 degrees. Hotter water blistered the "
                "skin in the last season; rubbing with snow is forbidden.",
                "At how many degrees should the water be?",
                "38",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "route-unit",
            "Plan the tracks of the snow vehicles.",
            _step(
                "Three ways to the depot are scouted.",
                "The gully way has an open crevasse. The shelf way floods at noon. The "
                "moraine way is longer by an hour and firm throughout.",
                "Which way should the convoy take?",
                "moraine",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Convoy is under way; visibility falls.",
                "Flags on the first leg stand every hundred paces, on the second none. The hut at "
                "marker K9 has fuel and a stove; the hut at marker K4 lost its roof.",
                "At which marker should the convoy wait?",
                "k9",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "stores-unit",
            "Manage food and fuel of the ice station.",
            _step(
                "Inventory after the storm is done.",
                "Flour lasts forty days, lentils sixty, dried milk eleven. The next aircraft "
                "comes in thirty. What lasts less than that has to be rationed.",
                "What do I have to ration?",
                "milk",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Rations are posted; heating oil is low.",
                "The gymnasium takes a third of the oil and is used twice a week. The laboratory "
                "must not freeze. The dormitory must not freeze. One building has to go cold.",
                "Which building should I stop heating?",
                "gymnasium",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "signals-unit",
            "Keep the station's radio links open.",
            _step(
                "The main aerial is down.",
                "The whip aerial reaches the ship alone. The dish has no power. The dipole can be "
                "strung between the masts in an hour and reaches the mainland.",
                "Which aerial should I put up?",
                "dipole",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Aerial stands; looking for a clear channel.",
                "Channel 22 is full of static from the aurora. Channel 61 belongs to the whalers. "
                "Channel 47 was clear during three checks.",
                "Which channel should we call on?",
                "47",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "drilling-unit",
            "Drill and log the ice core.",
            _step(
                "The drill is stuck at a dust layer.",
                "More torque would snap the cable. Lifting needs the winch that is being mended. "
                "Glycol poured down the hole freed it last year within a night.",
                "What should I pour down the hole?",
                "glycol",
                urgency=Urgency.HIGH,
            ),
            _step(
                "Drill is free; the core is cracking.",
                "Cores cut in pieces of two metres cracked in the tray. Pieces of 55 centimetres "
                "stayed whole. Shorter ones fill the boxes too soon.",
                "How many centimetres long should the pieces be?",
                "55",
                urgency=Urgency.HIGH,
            ),
        ),
    ),
)

_FOOTBRIDGE = Scenario(
    "footbridge_n5_cascade",
    "a chain of trades that all speak of the same bridge",
    (
        _agent(
            "ground-survey",
            "Survey the ground on both banks for the footbridge.",
            _step(
                "Three borings are finished.",
                "Boring A met peat down to nine metres. Boring B met gravel at once but floods. "
                "Boring D met sandstone at two metres, above the flood line.",
                "At which boring should the bridge land?",
                "boring d",
                "at d",
                "sandstone",
            ),
            _step(
                "Landing is fixed; one bank is steep.",
                "The steep bank moved by nine millimetres in spring. Gabions held a like bank "
                "downstream for ten years. A plain wall there has tilted.",
                "What should hold the steep bank?",
                "gabion",
            ),
        ),
        _agent(
            "foundation-works",
            "Design the footings of the footbridge.",
            _step(
                "Loads of the bridge are known.",
                "A slab footing would need a pit below the water. Driven piles shake the old mill. "
                "Screwed micropiles carry the load and are quiet.",
                "Which kind of footing should I draw?",
                "micropile",
            ),
            _step(
                "Footing is drawn; the concrete is open.",
                "The river water is acid. The mix with plain cement failed in the lab, the mix "
                "with slag lasted. Resin mortar costs six times as much.",
                "Which mix should I specify?",
                "slag",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "girder-works",
            "Design the girders of the footbridge.",
            _step(
                "Three shapes are computed.",
                "The arch pushes on the banks, which may not be pushed. The cable shape sways "
                "with walkers. The truss of Vierendeel type sways little and pushes nothing.",
                "Which shape should the girders have?",
                "vierendeel",
                "truss",
            ),
            _step(
                "Shape is fixed; protection is open.",
                "Paint has to be renewed every eight years over the water, which the town refuses. "
                "Weathering steel stains the path. Galvanizing lasts fifty years.",
                "How should the girders be protected?",
                "galvani",
                urgency=Urgency.LOW,
            ),
        ),
        _agent(
            "decking-works",
            "Design the deck and the railing of the footbridge.",
            _step(
                "Samples have lain outside over winter.",
                "Larch boards grew slippery. Glass fibre grating caught the paws of dogs. Boards "
                "of black locust stayed rough.",
                "Which boards should the deck get?",
                "locust",
            ),
            _step(
                "Deck is chosen; the railing is open.",
                "The rule for cyclists asks for a height of 130 centimetres, the one for walkers "
                "for 100. Cyclists may use the bridge, so that the stricter rule holds.",
                "How many centimetres high should the railing be?",
                "130",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "acceptance-office",
            "Prepare the tests before the footbridge opens.",
            _step(
                "Test methods are compared.",
                "Sandbags take two days and a crane. Water tanks may spill on the mill. A marching "
                "squad of volunteers also shows the swaying and takes an hour.",
                "Who or what should load the bridge in the test?",
                "squad",
                "volunteers",
            ),
            _step(
                "Test is planned; the day is open.",
                "On Tuesday the weir is shut and the water low. On Thursday the fair fills the "
                "banks. On Friday the engineer is away. Low water is needed for the boats.",
                "On which day should the test be?",
                "tuesday",
            ),
        ),
    ),
)

_FESTIVAL = Scenario(
    "festival_n10",
    "ten unlike tasks",
    (
        _agent(
            "main-stage",
            "Run the main stage of the town festival.",
            _step(
                "Sound check is late.",
                "The brass band needs no amplifiers and is here. The synth trio's van is on the "
                "motorway. The choir sings at dusk by contract.",
                "Who should play first?",
                "brass",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "food-court",
            "Allot the stalls of the food court.",
            _step(
                "One stall with a gas line is left.",
                "The dumpling stall cooks with steam from gas. The crepe stall brings electric "
                "plates. The salad stall cooks nothing.",
                "Who should get the stall with the gas line?",
                "dumpling",
            ),
        ),
        _agent(
            "first-aid",
            "Staff the first-aid tents.",
            _step(
                "Last year's cases are counted.",
                "The lake side had 6 cases, the climbing wall 41, the dance floor 15. One "
                "doctor is on duty and belongs where most cases are.",
                "Where should the doctor be?",
                "climbing",
            ),
        ),
        _agent(
            "ticket-office",
            "Sell and check the tickets.",
            _step(
                "Scanners of two makers were tried.",
                "Scanner Pica failed in sunlight. Scanner Quill read all tickets and ran nine "
                "hours. Scanner Rondo needs a network that the meadow lacks.",
                "Which scanner should we rent?",
                "quill",
            ),
        ),
        _agent(
            "shuttle-lines",
            "Plan the buses between station and meadow.",
            _step(
                "Roads were driven at noon.",
                "The bridge road jams behind the market. The mill road is closed to buses. The "
                "quarry road takes four minutes more and is free all day.",
                "Which road should the buses take?",
                "quarry",
            ),
        ),
        _agent(
            "power-grid",
            "Supply electricity to all sites.",
            _step(
                "Loads of the evening are summed.",
                "The evening needs 240 kilowatts. Generator Minke gives 120, generator Sperm "
                "200, generator Orca 310. Two cannot be coupled.",
                "Which generator should we order?",
                "orca",
                urgency=Urgency.HIGH,
            ),
        ),
        _agent(
            "waste-crew",
            "Keep the meadow clean.",
            _step(
                "Cups were compared.",
                "Paper cups go to landfill here. Cups of maize need a plant two hours away. "
                "Cups of steel with a deposit came back at 97 in a hundred.",
                "Which cups should the bars use?",
                "steel",
                urgency=Urgency.LOW,
            ),
        ),
        _agent(
            "kids-corner",
            "Prepare the programme for children.",
            _step(
                "Acts were rehearsed with a school class.",
                "The magician frightened the small ones. The storyteller was not heard over the "
                "band. The puppeteer kept all ages for half an hour.",
                "Which act should I book for the afternoon?",
                "puppet",
            ),
        ),
        _agent(
            "press-point",
            "Look after the journalists.",
            _step(
                "Interview wishes are sorted.",
                "Radio Vesper goes live at five and has no slot. The monthly Kestrel prints in "
                "three weeks. The blog takes a written text. The one free slot is at five.",
                "Who should get the slot at five?",
                "vesper",
            ),
        ),
        _agent(
            "camp-ground",
            "Place the tents of the overnight guests.",
            _step(
                "The ground was probed after the rain.",
                "The lower field holds water. The orchard has wasps. The terrace "
                "drained overnight and has a tap.",
                "Where should the tents go?",
                "terrace",
                urgency=Urgency.HIGH,
            ),
        ),
    ),
)


def _station(
    name: str, platform: str, track: str, fault: str, spare: str, urgency: Urgency
) -> ScriptedAgent:
    """One of ten agents whose texts differ in the facts alone."""
    return _agent(
        f"{name}-station",
        f"Run the trains of {name.capitalize()} station during the works.",
        _step(
            f"Works reached the {fault}.",
            f"The {fault} is out of use until evening. The express is too long for platform "
            f"{track}. Platform {platform} is long enough and free. The stopping train can wait.",
            "Which platform should the express use?",
            platform,
            urgency=urgency,
        ),
        _step(
            "Express has left; the crew change is open.",
            f"The rostered driver is held up behind the {fault}. {spare} knows the line and is on "
            "standby. The trainee does not know the line.",
            "Who should drive the next train?",
            spare.lower(),
        ),
    )


_STATIONS = Scenario(
    "stations_n10_alike",
    "ten tasks alike, with the very same questions",
    (
        _station("ashby", "11b", "3", "north crossover", "Imogen", Urgency.HIGH),
        _station("belton", "12d", "5", "water crane", "Rasmus", Urgency.MEDIUM),
        _station("corby", "13f", "2", "signal bridge", "Yolanda", Urgency.MEDIUM),
        _station("dunmore", "14h", "6", "goods loop", "Fergus", Urgency.HIGH),
        _station("elstow", "15k", "1", "turntable", "Petronella", Urgency.LOW),
        _station("farley", "16m", "8", "level crossing", "Benedikt", Urgency.MEDIUM),
        _station("gadby", "17p", "4", "coal siding", "Saoirse", Urgency.MEDIUM),
        _station("hexton", "18r", "7", "footway", "Tadeusz", Urgency.HIGH),
        _station("ilston", "19t", "9", "buffer stop", "Wilhelmina", Urgency.LOW),
        _station("jarrow", "21v", "10", "catenary mast", "Leopold", Urgency.MEDIUM),
    ),
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _MUSEUM,
        _GREENHOUSE,
        _REFIT,
        _NEWSROOM,
        _EXPEDITION,
        _FOOTBRIDGE,
        _FESTIVAL,
        _STATIONS,
    )
}
"""All scenarios by name, with 3, 5 and 10 agents."""
