"""A plan's guarantee in words: its unit, its mechanism, its assumptions, who is trusted, and what is not covered.

Every sentence follows from the plan alone and not from what a run did, so a test can check it against its plan. A
sentence stands here because the code makes it true, or because a reader could believe the contrary of it.
Refused: prose in a template, which hides which sentence belongs to which plan.
"""

from __future__ import annotations

from cloister.privacy.accounting.accountant import Spent
from cloister.privacy.accounting.terms import Terms, participation
from cloister.privacy.mechanism.correlated import Blt, loss
from cloister.protocol.plan.plan import (
    NO_EVALUATION,
    SIMULATED_PUBLIC,
    DataSection,
    Plan,
    PrivacySection,
    SelectionSection,
)


def _thing(plan: Plan) -> str:
    """The name of one unit, with privacy.unit = "record" or "owner"."""
    if plan.privacy.unit == "owner":
        return "owner"
    if plan.privacy.record == "window":
        return "window"
    return {"text": "text", "prompt": "prompt with its completion", "messages": "chat"}[plan.data.format]


def unit(plan: Plan) -> str:
    """What the guarantee protects, with its article; empty without a privacy unit."""
    if plan.privacy.unit == "none":
        return ""
    if plan.privacy.unit == "site":
        return "everything that one site holds"
    return unit_in_words(plan.data, plan.privacy)


def unit_in_words(data: DataSection, privacy: PrivacySection) -> str:
    """What the guarantee of unit `record` protects: "one text, of which the first 512 tokens ...".

    With unit `owner`: "all records of one owner at one site, named by the field 'patient_id', of which at most 8 ...".
    """
    if privacy.unit == "owner":
        owned = (
            f"all records of one owner at one site, named by the field {data.owner!r}, of which at most "
            f"{privacy.records}"
        )
        if privacy.record == "window":
            return f"{owned} windows of {data.sequence_length} tokens are used"
        return f"{owned} are used, each with its first {_used(data, privacy)} tokens"
    if privacy.record == "window":
        return f"a window of {data.sequence_length} tokens of a text"
    by_format = {
        "text": "one text with its label" if data.task == "classify" else "one text",
        "prompt": "one prompt with its completion",
        "messages": "one chat",
    }
    return f"{by_format[data.format]}, of which the first {_used(data, privacy)} tokens are used"


def _used(data: DataSection, privacy: PrivacySection) -> int:
    """Tokens of a record that are used at most; a text that is classified is one sequence."""
    return data.sequence_length * (1 if data.task == "classify" else privacy.windows)


def charged_unit(plan: Plan) -> str:
    """The unit in which a dataset is charged over its runs: with what differs between units of two plans.

    A site is the records that a division of the dataset gives it: a site of another division is no such unit.
    """
    if plan.privacy.unit == "site":
        data, way = plan.simulation, plan.simulation.partition
        by = f" by the field {data.field!r}" if data.field else ""
        by += f" with alpha {data.alpha:g}" if way == "dirichlet" else ""
        fixed = data.field and way in ("natural", "auto") and not data.public  # groups in order of size
        drawn = "" if fixed else f", drawn with seed {plan.run.seed}, without a share of {data.public:g}"
        return f"one site of {plan.cohort.sites} of {data.source} ({data.split}), {way}{by}{drawn}"
    if plan.privacy.unit == "owner":
        return f"one owner, named by the field {plan.data.owner!r}"
    if plan.privacy.record == "window":
        tokenizer, field = plan.model.tokenizer_name, plan.data.text_field
        return f"one window of {plan.data.sequence_length} tokens ({tokenizer}) of the field {field!r}"
    return f"one {_thing(plan)}"


def things(plan: Plan) -> str:
    """The name of several units; empty without a privacy unit."""
    if plan.privacy.unit == "none":
        return ""
    if plan.privacy.unit == "site":
        return "sites"
    thing = _thing(plan)
    return "prompts with their completions" if thing.startswith("prompt") else f"{thing}s"


def trust_model(plan: Plan) -> str:
    """Where the noise is added, and so who sees what before it: the trust model, in the words of NIST SP 800-226."""
    privacy, secure = plan.privacy, plan.aggregation.secure
    if privacy.unit == "none":
        return ""
    if plan.simulation.search is not None:
        return (
            "Central: the machine on which the search ran saw every trial, and gave out the best one alone. Its owner "
            "is trusted; everybody who receives the models of this run sees the best trial, whose noise was added as "
            "the plan says."
        )
    if privacy.dpsgd:
        return (
            "Each site is the curator of its own records and adds the noise before anything leaves it. The "
            "coordinator, the other sites and everybody who receives the models see noised values only."
            f"{_crafted(plan)}"
        )
    if privacy.trusted_coordinator:
        sees = "the sum of the updates" if secure else "every update"
        return (
            f"Central: the coordinator sees {sees} without noise and adds the noise. It is trusted; everybody who "
            "receives the models sees noised values only."
        )
    found = plan.threshold()
    of = " or ".join(str(n) for n in plan.summed())
    return (
        "Distributed: each site adds a part of the noise, and a secure sum shows the coordinator only the total. It "
        f"holds as long as at most {found.colluders} of the {of} sites of a sum work with the coordinator."
    )


def _crafted(plan: Plan) -> str:
    """What a plan that takes gradients of many units at a time trusts the coordinator with, after a space."""
    if plan.privacy.method != "opacus":
        return ""
    return (
        " The coordinator is trusted to send no crafted weights: gradients were taken of many units at a time, and "
        "such weights can amplify how one unit changes the rounding of others."
    )


def protected_from(plan: Plan) -> str:
    """Against whom the guarantee holds, for a reader who is not an engineer."""
    privacy = plan.privacy
    if privacy.unit == "none":
        return ""
    if plan.simulation.search is not None:
        return (
            "Everybody who gets the models of this run and learns nothing else of the search of which it is the best "
            "trial, whatever they know of the data. Not the owner of the machine on which the search ran, nor any "
            "party of its trials: the coordinator and the sites of a trial saw each of its rounds."
        )
    everybody = "Everybody who gets the trained models, whatever else they know"
    if privacy.dpsgd:
        coordinator = "" if privacy.trusts_coordinator else "the coordinator of the training and "
        return (
            f"{everybody}; also {coordinator}the other sites.{_crafted(plan)} Not the site itself, which holds the "
            "data in the clear."
        )
    if privacy.trusted_coordinator:
        return (
            f"{everybody}; also the other sites. Not the coordinator of the training: it saw more than it gave out, "
            "and has to be trusted. And not the site itself, which holds its data in the clear."
        )
    colluders = plan.threshold().colluders
    joined = f", unless more than {colluders} of the sites work together with it" if colluders else ""
    return (
        f"{everybody}; also the coordinator of the training{joined}. A site that knows its own share of the noise is "
        "protected from a little less. Not the site itself, which holds its data in the clear."
    )


def responsible(plan: Plan, *, simulated: bool) -> tuple[str, ...]:
    """Who is responsible for what, for a reader who is not an engineer."""
    if plan.privacy.unit == "none":
        return ()
    noise = "" if plan.privacy.trusted_coordinator else ", adds the noise"
    coordinator = (
        "adds the noise, keeps everything before it secret, and stops at the budget"
        if plan.privacy.trusted_coordinator
        else "runs the training and stops at the budget"
    )
    where = "In this simulation all of them were on one machine with one owner. " if simulated else ""
    return (
        (
            f"{where}Each site looks after its own data and machine, runs the software unchanged{noise}, and counts "
            "what its data has spent."
        ),
        f"The coordinator {coordinator}.",
        (
            "The person who signs decides whether the protected unit is the right one, whether the protection is "
            "strong enough, and which other uses of the same data count with it."
        ),
    )


def exposure(plan: Plan, *, simulated: bool) -> str:
    """How exposed the data is before the mechanism: what no differential privacy changes."""
    where = (
        "All records were on one machine"
        if simulated
        else "Records were not collected: each site kept its own, and only updates left it"
    )
    return (
        f"{where}. At a site, records, ledger and finished updates are stored without encryption by this software. "
        " Access control there, and how the data was collected, are outside this report."
    )


def relation(plan: Plan) -> str:
    """How neighbouring data sets differ: the words after `data sets that differ by`."""
    if plan.privacy.unit == "none":
        return ""
    if plan.privacy.unit == "site":
        return (
            "adding or removing all records of one site, which sends zeros in every coordinate if it has none"
        )
    if plan.privacy.unit == "owner":
        return "adding or removing all records of one owner at one site"
    return f"adding or removing one such {_thing(plan)} at one site"


def mechanism(plan: Plan, terms: Terms | None) -> str:
    """What adds noise to what."""
    if terms is None:
        return ""
    local, privacy = plan.local, plan.privacy
    if terms.mechanism is None:
        thing = _thing(plan)
        of_windows = "" if privacy.record == "window" else ", the mean over its sequences,"
        if privacy.unit == "owner":
            each = f"at most {privacy.records} {privacy.record}s of this owner"
            of_windows = f", the mean over {each}, which are chosen from this owner's records alone,"
        return (
            f"DP-SGD in each site (Abadi et al. 2016). In each of the {local.steps} local steps of a round "
            f"each {thing} is drawn into the batch independently, with the sampling rate as its probability. "
            f"Its gradient{of_windows} is clipped to the L2 norm C, and Gaussian noise with a standard "
            "deviation of C times the noise multiplier is added to every coordinate of the sum. The sum "
            f"is divided by {local.batch_size * local.accumulation}, the batch size that the plan expects, "
            "and not by the size of the batch that was drawn."
        )
    noise = terms.mechanism
    if noise.variance:
        honest = plan.honest()
        text = (
            f"Each site clips its whole update to the L2 norm C, rounds it to integers of bounded norm "
            f"({noise.scale:g} steps in C) and adds Skellam noise of variance {noise.variance:.6g} to "
            f"each of them; the secure sum carries the total. At least {honest} honest sites are in "
            f"every sum, and the noise of {honest} sites together has a standard deviation of "
            f"{noise.deviation:.6g} C."
        )
    elif noise.correlation is not None:
        text = _correlated(plan, noise.correlation, noise.deviation)
    else:
        text = (
            "Each site clips its whole update to the L2 norm C. The coordinator adds Gaussian noise with "
            f"a standard deviation of {noise.deviation:.6g} C to every coordinate of the sum, before "
            "anything else is computed from it."
        )
    if local.balance != "fixed":
        summed = "group" if plan.aggregation.groups > 1 else "cohort"
        text = (
            f"Each site first scales its update by the mean of the {summed}'s local steps over its own: the numbers "
            f"are public and follow from declared speeds, not from data. {text}"
        )
    if plan.aggregation.groups > 1:
        text = (
            f"A public draw divides the sites of a round into {plan.aggregation.groups} groups; a site is in one of "
            "them, and each group has a sum of its own with all of the noise. So all sums of a round cost a site what "
            "the sum of its group costs. The model moves by the median of the groups' noised means in each coordinate, "
            f"which costs nothing more. {text}"
        )
    if privacy.adaptive is not None:
        text += (
            " C follows a quantile of the updates' norms (Andrew et al. 2021) from the value shown here; "
            f"the count that gives the quantile has noise with a standard deviation of {noise.count_deviation:.6g}, "
            "and its cost is part of the same charge."
        )
    return text


def _correlated(plan: Plan, blt: Blt, deviation: float) -> str:
    """The mechanism of correlated noise."""
    pattern = participation(plan)
    assert pattern is not None, "a mechanism with a matrix has a plan with a pattern"
    buffers = len(blt.decay)
    vectors = "one vector" if buffers == 1 else f"{buffers} vectors"
    return (
        "Each site clips its whole update to the L2 norm C. The coordinator adds Gaussian noise to every coordinate "
        "of the sum, before anything else is computed from it. The noise is correlated over the rounds: that of "
        f"round t is row t of the inverse of a buffered linear Toeplitz matrix, of {vectors} of state, times "
        f"independent Gaussian noise with a standard deviation of {deviation:.6g} C (DP-FTRL; McMahan et al. 2024). "
        f"A site takes part in at most {pattern.most} of {pattern.rounds} rounds, any two of them at least "
        f"{pattern.separation} apart; for such a site all rounds together are one Gaussian mechanism with the noise "
        "multiplier shown here. The noise on the sum of all rounds has a standard deviation of "
        f"{loss(blt, pattern):.4g} C times the noise multiplier; with independent noise of the same epsilon it would "
        f"be {loss(Blt(), pattern):.4g} C times it."
    )


def method(plan: Plan) -> str:
    """How the mechanism is computed: how gradients are taken, or who adds the noise."""
    privacy = plan.privacy
    if privacy.unit == "none":
        return ""
    if privacy.unit == "site":
        return "noise added by the coordinator" if privacy.trusted_coordinator else "noise added by the sites"
    return {
        "reference": "one gradient at a time, each with its own forward and backward pass",
        "opacus": "gradients of many units at a time by Opacus; a site refuses the plan if they were not tested "
        "against single backward passes for models of this kind",
    }[privacy.method]


def accountant(plan: Plan, most: Spent | None) -> str:
    """How losses were composed; `most` is what the site with the largest loss has spent, if any site was charged."""
    used = plan.privacy.accountant if most is None else most.accountant
    if used == "pld":
        text = (
            "privacy loss distributions, rounded towards more loss (dp-accounting)"
            if plan.privacy.dpsgd
            else "Gaussian mechanisms, composed into one in closed form (Balle and Wang 2018)"
        )
    else:
        text = "Renyi divergences (Mironov 2017), converted as by Canonne, Kamath and Steinke 2020"
        if plan.privacy.unit == "site" and not plan.privacy.trusted_coordinator:
            text += "; Skellam noise by the bound of Agarwal, Kairouz and Liu 2021"
    text += ", over all charges of a site in this run"
    return f"{text}. {most.note[:1].upper()}{most.note[1:]}" if most is not None and most.note else text


def assumptions(plan: Plan, terms: Terms | None, *, simulated: bool) -> tuple[str, ...]:
    """What must be true for the guarantee to hold; `simulated`: the sites' own ledgers were read as well."""
    if terms is None:
        return ()
    own = (
        "The sites' own ledgers were read as well; if one of them counts more, its epsilon is shown."
        if simulated
        else "The sites' own ledgers were not read for this report. If one of them counts more, it is the one "
        "that is right."
    )
    runs = _runs(plan, simulated=simulated)
    if plan.privacy.dpsgd:
        return (*_private_steps(plan, own), runs)
    noise = _noise_at_coordinator(plan) if plan.privacy.trusted_coordinator else _noise_at_sites(plan)
    return (*noise, *_sites_as_units(plan, own), runs)


def _drawn(plan: Plan) -> str:
    """How noise and batches are drawn."""
    if plan.simulation.noise_seed is None:
        key = "a secret key, which protects only against adversaries who cannot break AES-128"
    else:
        key = "a key that is derived from the plan's declared seed and is not secret"
    return f"from AES-128 in counter mode under {key}"


def _real_arithmetic(of: str) -> str:
    """What the guarantee assumes of floating-point numbers."""
    return (
        f"{of} and noise are floating-point numbers, and the noise is not an exact sample of its distribution. The "
        "guarantee is for real arithmetic; the loss that rounding adds is not counted."
    )


def _private_steps(plan: Plan, own: str) -> tuple[str, ...]:
    """What DP-SGD assumes, and what it counts."""
    return (
        (
            f"In every step each {_thing(plan)} of a site is drawn into the batch independently (Poisson sampling), "
            f"and it stays secret which were drawn. Batches are drawn {_drawn(plan)}."
        ),
        f"The noise is drawn {_drawn(plan)}. Each training has its own key.",
        _real_arithmetic("Gradients, norms, sums"),
        (
            "The model computes the loss of each sequence separately, without statistics over a batch. If it "
            "has dropout, the dropout masks come from torch's generator under a secret seed and are assumed "
            "to be random."
        ),
        *_repeated(plan),
        (
            "Epsilon counts every round in which a site was asked to train, even if the attempt failed, the "
            "site dropped out or the round was given up. A round counts once, because a later attempt "
            "sends the update that the site kept. A site that lost its update trains again and charges its "
            f"own ledger again. {own}"
        ),
    )


def _noise_at_coordinator(plan: Plan) -> tuple[str, ...]:
    """What a trusted coordinator's noise assumes."""
    kept = (
        "The coordinator kept the key of the noise secret, and used the noise of each round for one sum only, "
        "also after a crash: its run folder was not replaced by an earlier copy."
    )
    return (
        f"The coordinator drew the noise {_drawn(plan)}. It disclosed no sum without noise.",
        *([kept] if plan.privacy.correlated is not None else []),
        _real_arithmetic("Norms, sums"),
    )


def _noise_at_sites(plan: Plan) -> tuple[str, ...]:
    """What the sites' noise in a secure sum assumes."""
    colluders, secure = plan.threshold().colluders, plan.aggregation
    against = (
        "The guarantee holds against adversaries who know no site's noise. A site knows its own noise, and "
        "against that site the guarantee is weaker than stated here."
        if colluders == 0
        else f"The guarantee holds against adversaries who know the noise of at most {colluders} of the sites in "
        "a sum; each site knows its own noise."
    )
    return (
        (
            f"At least {plan.honest()} sites in every sum that can be opened added their noise and keep it secret; a "
            f"sum by the protocol has at least {plan.quorum()} sites. {against}"
        ),
        (
            "The secure sum is secure: no update is seen before it is summed, and of the updates of one "
            f"{'group' if secure.groups > 1 else 'cohort'} only one sum is opened. Its security rests on X25519, "
            f"Ed25519, ChaCha20-Poly1305, {'AES-256' if secure.cipher == 'aes-256-ctr' else 'ChaCha20'} and the keys "
            "in the roster."
        ),
        (
            f"The noise is drawn {_drawn(plan)}. It is an integer from a rejection sampler that compares probabilities "
            "in 64-bit floating point, and is assumed to be an exact sample of its distribution. Updates are "
            "clipped in floating point."
        ),
    )


def _sites_as_units(plan: Plan, own: str) -> tuple[str, ...]:
    """What unit `site` assumes of neighbours, cohorts and charges."""
    zeros = (
        "Neighbouring data sets differ in one site: in one of the two it has no records, and sends zeros in every "
        f"coordinate of every round{', the count that gives the quantile included' if plan.privacy.adaptive else ''}. "
        "Two different data sets of a site are two such steps apart, like a group of two sites: between them epsilon "
        "is up to twice as large, and delta is larger too."
    )
    if plan.privacy.correlated is not None:
        return (
            zeros,
            (
                "The cohorts are a public partition of the roster that is taken in turn, so drawing them does not make "
                "epsilon smaller. Each site checked that its own rounds were as few and as far apart as the plan "
                "states."
            ),
            (
                "Epsilon is that of the whole run, and is charged in full in a site's first round: a site that took "
                f"part in fewer rounds, or a run that ended early, costs no less. {own}"
            ),
        )
    return (
        zeros,
        "It is public which sites are in a cohort, so drawing the cohort does not make epsilon smaller.",
        (
            "Epsilon counts every round in which a sum that contains a site's update was opened or about to be "
            "opened, also if the round was given up and the model did not move by it. A site's own ledger counts a "
            f"round as soon as the site trains. {own}"
        ),
    )


def _runs(plan: Plan, *, simulated: bool) -> str:
    """Which runs are counted together."""
    simulation = plan.simulation
    if simulation.search is None:
        return _counted(plan, simulated=simulated)
    if simulation.ledger:
        return f"{searched(plan)} {_counted(plan, simulated=simulated)}"
    return (
        f"{searched(plan)} Other runs and searches over the same data add to it, and nothing in this simulation counts "
        "them: it was run without a ledger over runs."
    )


def law(search: SelectionSection) -> str:
    """The law of a search's number of trials in words, with its article."""
    names = {None: "a Poisson law", 0.0: "a logarithmic law", 1.0: "a geometric law"}
    return names.get(search.shape) or f"a truncated negative binomial law of shape {search.shape:g}"


def searched(plan: Plan) -> str:
    """What the price of the best trial of a search assumes; empty for a run that is no trial."""
    search = plan.simulation.search
    if search is None:
        return ""
    return (
        "The run is the best trial of a search, and epsilon is the price of the search (Papernot and Steinke 2022): "
        f"before the first trial the number of trials was drawn in secret from {law(search)} with mean "
        f"{search.mean:g}, each trial drew its settings and all its noise independently, and the trials were compared "
        "by their loss on public records. It holds only toward those who see no other trial, no other score, and not "
        "how many trials there were or how long the search took: all trials ran on one machine whose owner is "
        "trusted, and everything but the best trial was removed. Toward a party that saw the trials, as a coordinator "
        "or the owner of that machine did, epsilon is that of all trials together, which is not stated here."
    )


def _counted(plan: Plan, *, simulated: bool) -> str:
    simulation = plan.simulation
    if simulation.ledger:
        return (
            f"The epsilon over all runs counts the runs that charged the name {simulation.dataset!r} in the ledger of "
            "this simulation. Runs without that ledger, or under another name for the same data, add to it and are "
            "not counted. A run may be planned after seeing the results of earlier ones; a limit over runs whose "
            "mechanisms differ holds at twice its delta."
        )
    if simulated:
        return (
            "Epsilon is that of this run alone. Other runs over the same data add to it, and nothing in this "
            "simulation counts them: it was run without a ledger over runs."
        )
    return (
        "Epsilon is that of this run alone. Other runs over the same data add to it: a site's own ledger "
        "composes all of them and decides what may still be spent."
    )


def _repeated(plan: Plan) -> tuple[str, ...]:
    """What the units `record` and `owner` leave out: longer texts, repetitions, and several units of one person."""
    length, privacy = plan.data.sequence_length, plan.privacy
    if privacy.unit == "owner":
        used = f"Training uses at most {privacy.records} {privacy.record}s of an owner"
        if privacy.record == "record":
            used += f", and nothing of one beyond its first {privacy.windows * length} tokens"
        return (
            f"{used}.",
            (
                f"The field {plan.data.owner!r} has the same value in all records of one owner. An owner under two "
                "values is two units, and k of them together are protected with only about k times epsilon, at a "
                "larger delta. A record without a value is not used."
            ),
        )
    if privacy.record == "window":
        return (
            (
                f"Each window of {length} tokens of a text is a separate unit. A longer text is several units and "
                "is not protected as a whole by this epsilon: k windows together are protected with only about "
                "k times epsilon, at a larger delta."
            ),
            (
                "Windows that repeat each other or concern the same person are separate units, and count in the "
                "same way."
            ),
        )
    return (
        f"Training uses nothing of a {_thing(plan)} beyond its first {privacy.windows * length} tokens.",
        (
            f"Every {_thing(plan)} is a separate unit, even if it repeats another or concerns the same person. "
            "k of them together are protected with only about k times epsilon, at a larger delta."
        ),
    )


def trusted(plan: Plan, *, simulated: bool) -> tuple[str, ...]:
    """Who is trusted, and with what; `simulated`: the run was on one machine."""
    privacy, secure = plan.privacy, plan.aggregation.secure
    parties: list[str] = []
    if simulated:
        parties.append(
            "This run was a simulation: all sites and the coordinator were on one machine with one owner, "
            "who could read every record, update and key. What this page says about parties that do not "
            "trust each other applies to the same plan on separate machines."
            if plan.simulation.search is None
            else "This run was the best trial of a search: all trials, with their sites and coordinators, were on one "
            "machine. Its owner is trusted fully: to keep every other trial, their losses and their number to "
            "themselves."
        )
    if plan.simulation.search is not None:
        parties.append(
            "Each site and coordinator of the trials, which ran the software unchanged on that machine."
        )
    elif privacy.dpsgd:
        parties.append(
            "Each site, with its own records and its own noise: it runs the software unchanged and keeps its "
            "batches, its gradients and its noise keys secret. No site is trusted with the records of "
            "another site."
        )
        parties.append(
            _crafted(plan).strip()
            or "The guarantee does not depend on the coordinator or on the secure sum: an update has its noise "
            "before it leaves its site."
        )
    elif privacy.unit == "site":
        parties.append(
            "Each site, with its own records: it runs the software unchanged, and clips its own update"
            + ("." if privacy.trusted_coordinator else " and adds its own share of the noise.")
        )
        if privacy.trusted_coordinator:
            seen = "every sum without its noise" if secure else "every site's update without noise"
            parties.append(
                f"The coordinator, fully: it receives {seen}, adds the noise itself, and discloses nothing from "
                "before the noise was added."
            )
        else:
            parties.append("The coordinator is not trusted with any single update, and adds no noise.")
    elif secure:
        parties.append(
            "The coordinator, with the sums of the updates, which have no noise, but not with single updates."
        )
    else:
        parties.append("The coordinator, with every site's update in clear.")
    if privacy.unit != "none":
        parties.append(
            "The keeper of the run folder, with the figures on this page: a hash chain does not show that the "
            "whole chain was replaced. The sites' own ledgers show it, and so does a copy of the ledger's head "
            "that was kept elsewhere."
        )
    parties.append(
        "Each party, with the software that it ran: the versions on this page are those of the software that made "
        "this report."
    )
    return tuple(parties)


def poisoned(plan: Plan) -> tuple[str, ...]:
    """What a simulation says of the sites that it poisoned; a rehearsal poisons none."""
    poison = plan.faults.poison
    if poison is None:
        return ()
    factor = -poison.factor if poison.kind == "sign-flip" else poison.factor
    did = {
        "sign-flip": "",
        "scale": "",
        "label-flip": "they trained and were evaluated on false answers",
        "backdoor": f"they trained and were evaluated on records with the trigger {poison.trigger!r} and the target "
        f"{poison.target!r}",
    }[poison.kind]
    sent = (
        ""
        if factor == 1
        else f"they multiplied their updates by {factor:g} before these were bounded and summed"
    )
    return (
        (
            f"What poisoned sites did to the model. By the plan a share of {poison.share:g} of the simulated sites, "
            f"rounded and at least one, were attackers: {' and '.join(filter(None, (did, sent)))}. The model is for "
            "experiments only."
        ),
    )


def not_covered(plan: Plan) -> tuple[str, ...]:
    """What the guarantee says nothing about."""
    found: list[str] = []
    if plan.privacy.unit == "none":
        found.append(
            "The sites' records. Nothing here bounds what the models or the sums of updates reveal about them"
            + (
                "; a secure sum hides which site contributed what, but not what the sum reveals."
                if plan.aggregation.secure
                else "."
            )
        )
    if not plan.simulation.durable:
        found.append(
            "A power cut during the run: the plan set simulation.durable = false, so the simulated sites did not sync "
            "what they answered to disk, as deployed ones do."
        )
    return (
        *found,
        *_public_data(plan),
        *_beside_the_unit(plan),
        (
            "What a site reveals in other ways: that it takes part, when and for how long it works, that it drops "
            "out, and the reason that it gives when it refuses."
        ),
        (
            "Whether a site's software and data are what the site says they are. A site that sends a false update "
            "can damage the models, and a privacy guarantee does not prevent it."
        ),
    )


def _public_data(plan: Plan) -> list[str]:
    """The text and records that are assumed to be public."""
    evaluation = plan.server.evaluation
    found: list[str] = []
    if plan.public.source:
        found.append(
            f"The public text on which the model was trained before the first round: {plan.public.source}."
        )
    if not plan.model.name.startswith("builtin:"):
        found.append(f"What the base model learned before the run, and from which data: {plan.model.name}.")
    if evaluation == SIMULATED_PUBLIC:
        found.append(
            "The records that the simulation withheld from all sites for evaluation: they are assumed to be "
            "public."
        )
    elif evaluation not in ("", NO_EVALUATION):
        found.append(
            f"The records on which the coordinator evaluates: {evaluation}. They are assumed to be public."
        )
    return found


def _beside_the_unit(plan: Plan) -> list[str]:
    """What a guarantee for the plan's unit leaves out."""
    protected = plan.privacy.unit
    if protected == "none":
        return []
    number = "such units, which only the sites know"
    if protected == "site":
        number = f"sites, of which there are {plan.cohort.sites}"
    found = [
        (
            "Settings that were chosen from the results of other runs over the same data: each such run costs "
            "privacy, and so does the choice."
            if plan.simulation.search is None
            else "Settings that were chosen from the results of other runs over the same data than the trials of the "
            "search."
        ),
        f"Whether delta is small enough. It should be well below one over the number of {number}.",
    ]
    if protected == "record":
        found.append(
            "A site as a whole, or a person with many records: the models can learn what these records have in common."
        )
    if protected == "owner":
        found += [
            (
                "An owner who appears at two sites: this owner pays at both, and is protected with only about the sum "
                "of the two epsilons, at a larger delta."
            ),
            "A person whom the records of other owners mention, and a site as a whole.",
        ]
    return found
