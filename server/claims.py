"""What a plan's guarantee means, in words: unit, mechanism, what is assumed, who is trusted, what is left open.

Every sentence is about the plan and nothing that a run did, so a test can hold it against the plan that it belongs to.
A sentence is here because something in the code makes it true, or because nothing does and a reader would think so.
Refused: prose in a template, in which nobody sees which sentence belongs to which plan.
"""

from __future__ import annotations

from cloister.aggregation.graph import assumed
from cloister.privacy.accounting import Spent
from cloister.privacy.terms import Terms
from cloister.protocol.plan import NO_EVALUATION, SIMULATED_PUBLIC, Plan


def _thing(plan: Plan) -> str:
    """A unit of the kind `record`, in one word or two."""
    if plan.privacy.record == "window":
        return "window"
    return {"text": "text", "prompt": "prompt with its completion", "messages": "chat"}[plan.data.format]


def unit(plan: Plan) -> str:
    """What the guarantee protects, with its article; empty without a privacy unit."""
    if plan.privacy.unit == "none":
        return ""
    if plan.privacy.unit == "site":
        return "everything that one site holds"
    from cloister.lm.data import unit_in_words  # it imports transformers

    return unit_in_words(plan.data, plan.privacy)


def relation(plan: Plan) -> str:
    """How neighbouring data sets differ, as what follows `data sets that differ by`."""
    if plan.privacy.unit == "none":
        return ""
    if plan.privacy.unit == "site":
        return "the replacement of one site's updates by zeros in every round"
    return f"adding or removing one such {_thing(plan)} at one site"


def _honest(plan: Plan) -> tuple[int, int]:
    """Fewest sites in a sum that is opened, and most of them whose noise does not count."""
    return plan.cohort.needed(), assumed(plan.cohort.size(), plan.aggregation.colluders)


def mechanism(plan: Plan, terms: Terms | None) -> str:
    """What adds noise to what."""
    if terms is None:
        return ""
    local, privacy = plan.local, plan.privacy
    if terms.mechanism is None:
        thing = _thing(plan)
        of_windows = "" if privacy.record == "window" else ", the mean over its sequences,"
        return (
            f"DP-SGD in each site (Abadi et al. 2016). In each of the {local.steps} local steps of a round "
            f"every {thing} is in the batch on its own with the sampling rate as its probability, its "
            f"gradient{of_windows} is clipped to the L2 norm C, and Gaussian noise with a standard "
            "deviation of C times the noise multiplier is added to every coordinate of the sum. The sum "
            f"is divided by {local.batch_size * local.accumulation}, the batch size that the plan expects "
            "and not the one that was drawn."
        )
    noise = terms.mechanism
    if noise.variance:
        needed, colluders = _honest(plan)
        text = (
            "Each site clips its whole update to the L2 norm C, rounds it to integers of bounded norm "
            f"({noise.scale:g} steps in C) and adds Skellam noise of variance {noise.variance:.6g} to "
            f"each of them; the secure sum carries the total. The noise of the {needed - colluders} honest "
            f"sites that are surely in a sum has a standard deviation of {noise.deviation:.6g} C "
            "together."
        )
    else:
        text = (
            "Each site clips its whole update to the L2 norm C. The coordinator adds Gaussian noise with "
            f"a standard deviation of {noise.deviation:.6g} C to every coordinate of the sum, before "
            "anything else is computed from it."
        )
    if privacy.adaptive is not None:
        text += (
            " C follows a quantile of the updates' norms (Andrew et al. 2021) from the value shown here; "
            f"the count that it follows is noised with standard deviation {noise.count_deviation:.6g}, "
            "and is paid for in the same charge."
        )
    return text


def method(plan: Plan) -> str:
    """How it was computed: how gradients are taken, or who adds the noise."""
    privacy = plan.privacy
    if privacy.unit == "none":
        return ""
    if privacy.unit == "site":
        return "noise added by the coordinator" if privacy.trusted_coordinator else "noise added by the sites"
    return {
        "reference": "one gradient at a time, each by passes of its own",
        "opacus": "gradients of many at a time by Opacus; a site refuses the plan for a model for which these were not "
        "tested against single backward passes",
        "auto": "gradients of many at a time by Opacus, if they were tested against single backward passes for models "
        "of this kind, and otherwise one at a time; each site finds which from the plan and the model",
    }[privacy.method]


def accountant(plan: Plan, most: Spent | None) -> str:
    """How losses were composed; `most` is what the site that has spent most has spent, where a site has."""
    used = plan.privacy.accountant if most is None else most.accountant
    if used == "pld":
        text = (
            "privacy loss distributions, rounded to the safe side (dp-accounting)"
            if plan.privacy.unit == "record"
            else "Gaussian mechanisms together are one, in closed form (Balle and Wang 2018)"
        )
    else:
        text = "Renyi divergences (Mironov 2017), converted as by Canonne, Kamath and Steinke 2020"
        if plan.privacy.unit == "site" and not plan.privacy.trusted_coordinator:
            text += "; Skellam noise by the bound of Agarwal, Kairouz and Liu 2021"
    text += ", over everything that a site was charged in this run"
    return f"{text}. {most.note[:1].upper()}{most.note[1:]}" if most is not None and most.note else text


def assumptions(plan: Plan, terms: Terms | None, *, simulated: bool) -> tuple[str, ...]:
    """What must be true for the guarantee to hold; `simulated`: the sites' own ledgers were read too."""
    if terms is None:
        return ()
    privacy = plan.privacy
    own = (
        "The sites' own ledgers were read too, and where one of them counts more, its epsilon is shown."
        if simulated
        else "The sites' own ledgers were not seen for this report. Where one of them counts more, it is "
        "right."
    )
    key = (
        "from AES-128 in counter mode under a secret key; whoever can break AES-128 is not held off"
        if plan.simulation.noise_seed is None
        else "from AES-128 in counter mode under a key that follows from the plan's declared seed, and is "
        "no secret"
    )
    runs = (
        "Epsilon is of this run alone. Other runs over the same data add to it: a site's own ledger "
        "composes over all of them, and decides what may still be spent."
    )
    if privacy.unit == "record":
        thing = _thing(plan)
        return (
            (
                f"In every step each {thing} of a site is in the batch on its own (Poisson sampling), and "
                f"nobody learns which were drawn. Batches are drawn {key}."
            ),
            f"The noise is drawn {key}. Each training has a key of its own.",
            (
                "Gradients, norms, sums and noise are floating-point numbers, and the noise is not an exact "
                "sample of its law. The guarantee is of real arithmetic; what rounding adds to the loss is "
                "not counted."
            ),
            (
                "The model gives each sequence a loss of its own, without statistics over a batch. Where it "
                "has dropout, its masks come from torch's generator under a secret seed and are taken for "
                "random."
            ),
            *_repeated(plan),
            (
                "Epsilon counts every round in which a site was asked to train, also where the attempt "
                "failed, the site dropped out or the round was given up. A round counts once: a later attempt "
                "sends the update that the site kept. A site that lost it trains again, and pays again in its "
                f"own ledger. {own}"
            ),
            runs,
        )
    counting = (
        "Epsilon counts the rounds in whose sum a site's update is. In a round that was given up no sum "
        "was opened, and the coordinator's ledger does not count it; a site's own ledger counts from the "
        f"moment at which it trains. {own}"
    )
    zeros = (
        "Neighbours are a site with its updates and the same site with zeros in their place. Between two "
        "different data sets of a site lie two such steps: epsilon is then up to twice as large, and "
        "delta grows too."
    )
    amplified = "Who is in a cohort is public, so epsilon is not made smaller by drawing it."
    if privacy.trusted_coordinator:
        return (
            f"The coordinator drew the noise {key}, and kept the sums without noise to itself.",
            (
                "Norms, sums and noise are floating-point numbers, and the noise is not an exact sample of "
                "its law. The guarantee is of real arithmetic; what rounding adds to the loss is not counted."
            ),
            zeros,
            amplified,
            counting,
            runs,
        )
    needed, colluders = _honest(plan)
    against = (
        "The guarantee is against those who know no site's noise. A site knows its own, and against it "
        "the guarantee is weaker than said here."
        if colluders == 0
        else f"The guarantee is against anybody who knows the noise of at most {colluders} of the sites in "
        "a sum; each site knows its own."
    )
    return (
        (
            f"In every sum that is opened are {needed} sites at least, of which at least {needed - colluders} "
            f"added their noise and keep it secret. {against}"
        ),
        (
            "The secure sum holds: nobody sees an update before it is summed, and of one cohort's updates one "
            "sum is opened. It rests on X25519, Ed25519, ChaCha20-Poly1305, "
            f"{'AES-256' if plan.aggregation.cipher == 'aes-256-ctr' else 'ChaCha20'} and the keys in the "
            "roster."
        ),
        (
            f"The noise is drawn {key}. It is an integer, sampled by a rejection that compares probabilities "
            "in 64-bit floating point, and is taken for an exact sample of its law. An update is clipped in "
            "floating point."
        ),
        zeros,
        amplified,
        counting,
        runs,
    )


def _repeated(plan: Plan) -> tuple[str, ...]:
    """What the unit is not, where it is a record or a window."""
    length, privacy = plan.data.sequence_length, plan.privacy
    if privacy.record == "window":
        return (
            (
                f"Each {length} tokens of a text are a unit of their own. A longer text is several units, and "
                "is not protected as a whole by this epsilon: for k windows together only about k times "
                "epsilon holds, at a larger delta."
            ),
            (
                "Windows that repeat, or that are about one person, are separate windows, and count in the "
                "same way."
            ),
        )
    return (
        f"Of a {_thing(plan)} nothing beyond its first {privacy.windows * length} tokens is learned from.",
        (
            f"Every {_thing(plan)} is a unit of its own, also where it repeats another or is of the same "
            "person. For k of them together only about k times epsilon holds, at a larger delta."
        ),
    )


def trusted(plan: Plan, *, simulated: bool) -> tuple[str, ...]:
    """Who is trusted, with what; `simulated`: the run was on one machine."""
    privacy, secure = plan.privacy, plan.aggregation.secure
    parties: list[str] = []
    if simulated:
        parties.append(
            "This run was a simulation: all sites and the coordinator were on one machine with one owner, "
            "who could read every record, update and key. What this page says of parties that need not "
            "trust each other is what the plan gives where they are apart."
        )
    if privacy.unit == "record":
        parties.append(
            "Each site, with its own records and its own noise: it runs the software unchanged, and keeps "
            "its batches, its gradients and the keys of its noise to itself. No site is trusted with "
            "another's."
        )
        parties.append(
            "The coordinator and the secure sum are not part of this guarantee: an update has its noise "
            "before it leaves its site."
        )
    elif privacy.unit == "site":
        parties.append(
            "Each site, with its own records: it runs the software unchanged, clips its own update"
            + ("." if privacy.trusted_coordinator else " and adds its own part of the noise.")
        )
        if privacy.trusted_coordinator:
            seen = "every sum without its noise" if secure else "every site's update without noise"
            parties.append(
                f"The coordinator, wholly: it receives {seen}, adds the noise itself, and shows nobody "
                "anything from before."
            )
        else:
            parties.append("The coordinator is not trusted with any single update, and adds no noise.")
    elif secure:
        parties.append(
            "The coordinator is not trusted with single updates, and is with their sums, which have no noise."
        )
    else:
        parties.append("The coordinator, with every site's update as it is.")
    if privacy.unit != "none":
        parties.append(
            "Whoever keeps the run folder, with the figures on this page: a chain of hashes does not show "
            "that it was made anew. The sites' own ledgers do, and so does a head of the ledger that was "
            "noted elsewhere."
        )
    parties.append(
        "Each party, with what it ran: the versions on this page are of the software that made the report."
    )
    return tuple(parties)


def not_covered(plan: Plan) -> tuple[str, ...]:
    """What the guarantee says nothing about."""
    privacy, evaluation = plan.privacy, plan.server.evaluation
    found: list[str] = []
    if privacy.unit == "none":
        found.append(
            "The sites' records. Nothing here bounds what the models or the sums of updates tell of them"
            + ("; a secure sum hides who said it, and not what was said." if plan.aggregation.secure else ".")
        )
    if plan.public.source:
        found.append(
            f"The public text that the model was trained on before the first round: {plan.public.source}."
        )
    if not plan.model.name.startswith("builtin:"):
        found.append(f"What the base model had learned before the run, and from what: {plan.model.name}.")
    if evaluation == SIMULATED_PUBLIC:
        found.append(
            "The records that the simulation kept apart from all sites for evaluation: they are taken as "
            "public."
        )
    elif evaluation not in ("", NO_EVALUATION):
        found.append(
            f"The records that the coordinator evaluates on: {evaluation}. They are taken as public."
        )
    if privacy.unit != "none":
        found.append(
            "Settings that were chosen by looking at other runs over the same data: each such run spends, "
            "and so does the choice."
        )
        found.append(
            f"Whether delta is small enough: it should be well below one over the number of "
            f"{'sites' if privacy.unit == 'site' else 'such units'}"
            + (
                f", of which there are {plan.cohort.sites}."
                if privacy.unit == "site"
                else ", which only the sites know."
            )
        )
    if privacy.unit == "record":
        found.append(
            "A site as a whole, or a person with many records: what is common to them may be learned."
        )
    found += [
        (
            "What a site shows otherwise: that it takes part, when and how long it works, that it drops out, "
            "and what it says when it refuses."
        ),
        (
            "Whether a site's software and data are what it says they are. A site that sends a false update "
            "can spoil the models, and no privacy guarantee forbids it."
        ),
    ]
    return tuple(found)
