"""Private training inside a site: DP-SGD (Abadi et al. 2016, "Deep learning with differential privacy", Algorithm 1)
over units that are records, windows of text, or owners with some of their records (`lm/data/prepare.py`).

One step, with C = `privacy.clip`, z the noise multiplier and B = `local.batch_size` x `local.accumulation`:

1. Each unit is in the batch with probability q = `privacy.sampling_rate`, on its own (Poisson sampling).
2. g_u, the gradient of a unit, is that of the mean over its windows of the mean loss per learned token of a window; of
   an owner, the mean over the records of this mean. The loss of a text that is classified is first multiplied by the
   weight of its class (`data.class_weights`), a number of the plan.
3. S = sum over the batch of g_u min(1, C / |g_u|), the L2 norm taken over all parameters that are trained.
4. The plan's optimizer, AdamW or Muon, steps on (S + N(0, z^2 C^2 I)) / B, which is post-processing, as are its
   moments, Muon's orthogonalization, weight decay and the proximal term, which depends on weights only.

Neighbouring data sets differ by one unit that is there or not; S then changes by at most C, whatever the unit holds. So
every step is one Poisson-sampled Gaussian mechanism with rate q and noise multiplier z, also where the batch is empty,
and a round is `local.steps` of them. The following keeps this true:

- B is a number of the plan. The size of the batch that was drawn is private, and so are losses and token counts.
- A unit whose gradient is not finite, or on which the model fails, contributes zero, without an error: an error would
  reveal that the unit is there.
- Batches, noise, dropout and what a task draws (`Task.drawn`) come from a secret stream of the site, never from the
  plan's public seed. With public dropout masks, one additional unit would change the masks of the units after it, and
  so S by more than C. Secret masks are the mechanism's own randomness, with the same law for every unit at any place in
  the batch. They come from torch's generator, whose state each unit has new from the secret stream; the guarantee
  assumes that they are random.
- What a pass writes to the model's own parameters and buffers is put back after each unit, so that it reaches neither
  another unit nor the update (`lm/model/writes.py`). Where the writes cannot be known, everything is put back.
- Only `ClippedSum` adds gradients up, and it releases the sum once, with noise.

S is summed in integers, so that rounding adds nothing to its sensitivity (`ClippedSum` has the bound). In a
floating-point sum one unit can decide how all later additions round (Casacuberta et al. 2022, "Widespread
underestimation of sensitivity in differentially private libraries and how to fix it"): in float32, one of 4,097 units
can move S by 1.25 C. Accounting does not see the rounding of the noise (`privacy/mechanism/noise.py`).

Two methods give the same g_u up to rounding. `reference` runs forward and backward on one unit at a time, so that g_u
depends on no other unit; it is right for every model that gives each sequence its own loss. `opacus` takes the
gradients of many windows from the hooks of Opacus (Yousefpour et al. 2021, "Opacus"), if `check_method` finds that
they are right, and that the model writes to none of its parameters and buffers. Then the last bits of g_u depend on
the units that go through the model together. Weights whose exact output is zero, such as factors of an adapter that
cancel, turn these bits into whole gradients: one unit moved S by 17 C. So with `opacus` the coordinator is trusted
not to craft weights. Nothing else of Opacus is used: its optimizers divide by the batch size or the size of the data,
and draw noise from torch. Refused: its faster ghost clipping, which takes two backward passes and is wrong for tied
weights.

In the ranks of a mesh, all draw the same batch from the same stream. Each replica takes units of its own, one after
the other by `reference`, whose rows its shards divide. The squares of a unit's gradient are summed over the replica, a
part that several ranks have once, and every rank clips its part by that norm. The integer sums of the replicas are
added up, which is exact; then each rank adds to its part the noise of the part's places in the flat vector. So all
ranks together release S with the noise of one process, once.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cloister.clients.training.release import MUST_STAY
from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.model.weights import Held, Named, Weights, whole
from cloister.lm.model.writes import Kept
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.evaluate import to_device
from cloister.lm.training.moments import Carry
from cloister.lm.training.optimizer import LocalOptimizer
from cloister.lm.training.train import Bench, LocalUpdate, add_proximal
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import ModelError, PlanError
from cloister.protocol.messages.blocks import runs
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.tasks import is_own

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)

RIGHT_BY_OPACUS = ("llama", "mistral", "qwen2", "qwen3")
"""Model types for which `tests/clients/training/test_dpsgd.py` compares gradients by Opacus with single passes."""
RIGHT_WITH_ADAPTER = ("bert",)
"""Types for which tests of their tasks do the same, where an adapter and a head are trained: their embeddings of
positions have one row for all sequences, of which the hooks make no gradient for each."""
_LONGEST = 1e30
"""In units of C, the norm up to which float32 can scale a gradient down without losing digits of the factor."""
_MARGIN = 1e-6
"""Relative margin by which the clip stays below C. It covers the rounding of the factor and of the products, 2^-24 each
in float32, and that of the norm, P 2^-54 for P elements in float64: together less than 2e-7 for P up to 2^30."""
_BITS = 38
"""A clipped term has at most 2^38 steps of the grid on which terms are summed."""
_MOST_UNITS = 2 ** (63 - _BITS)
"""Fewer units than this fit into a sum of 64-bit integers."""
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
_AT_ONCE = 2**24
"""Elements that are rounded to the grid at a time, which bounds the memory for it."""


def check_method(plan: Plan, model: LanguageModel, *, divided: bool = False) -> None:
    """Check that the gradients of a plan's `privacy.method` are right for its model, and those of a unit its own.

    A compiled block chooses its code by the shapes that it has met, so by the units before.

    Args:
        plan: The plan.
        model: Its model, as it is trained.
        divided: Whether a mesh divides its parameters among ranks.

    Raises:
        PlanError: the plan asks for Opacus, but its gradients are wrong or unproven for the model.
        ModelError: blocks of the model are compiled.
    """
    if any(module._compiled_call_impl is not None for module in model.module.modules()):
        raise ModelError("mesh.compile", True, expected=f"false with privacy.unit = '{plan.privacy.unit}'")
    batches = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    own = is_own(plan.data.task) or is_own(plan.model.type)
    if own and any(isinstance(module, batches) for module in model.module.modules()):
        raise ModelError(
            "model.name",
            plan.model.name,
            expected="a model without batch normalization, whose statistics are of several rows",
            fix="use a model with layer or group normalization",
        )
    wanted = plan.privacy.method
    if wanted == "opacus" and (problem := _wrong_by_opacus(plan, model, divided)):
        raise PlanError(
            "privacy.method",
            wanted,
            expected=f"reference, because {problem}",
            fix='set privacy.method = "reference"',
        )


def _wrong_by_opacus(plan: Plan, model: LanguageModel, divided: bool) -> str:
    """The reason that Opacus cannot be used, or an empty text."""
    if divided:
        return "a mesh with shard or tensor above 1 divides the parameters"
    kind = getattr(getattr(model.module, "config", None), "model_type", "")
    if not task_of(plan.data).by_opacus:
        return f"data.task is '{plan.data.task}', for which its gradients are not proven"
    proven = RIGHT_BY_OPACUS + (RIGHT_WITH_ADAPTER if plan.model.adapter.scheme != "full" else ())
    if kind not in proven:
        return f"the model is of type {kind}, and proven are {', '.join(proven)}"
    if model.written:
        return f"its passes write to {min(model.written)}"
    if any(_recomputes(module) for module in model.module.modules()):
        return "with gradient checkpointing its hooks see each layer twice"
    owners: dict[int, list[nn.Module]] = {}
    for module in model.module.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    parameters = dict(model.module.named_parameters())
    for name in model.layout.names:
        using = owners[id(parameters[name])]
        if len(using) > 1:
            return f"{name} is tied: several layers use it"
        layer = type(using[0])
        if layer not in (nn.Linear, nn.Embedding) and not layer.__name__.endswith("RMSNorm"):
            return f"{name} belongs to a layer of type {layer.__name__}"
    privacy, most = plan.privacy, plan.local.batch_size
    windows = privacy.windows if privacy.record == "record" and plan.data.kind.windows else 1
    windows *= privacy.records if privacy.unit == "owner" else 1
    if windows > most:
        return f"the {windows} windows of one {privacy.unit} do not fit into local.batch_size = {most}"
    return ""


def _recomputes(module: nn.Module) -> bool:
    """Whether a module may compute its activations again: transformers marks it, `parallelize` replaces `forward`."""
    return bool(getattr(module, "gradient_checkpointing", False)) or "forward" in vars(module)


def poisson_batch(noise: NoiseStream, n: int, rate: float) -> NDArray[np.int64]:
    """The units below `n` that are in a batch, each independently with probability `rate` (to 2^-53), in order."""
    return np.flatnonzero(noise.generator().random(n) < rate)


class ClippedSum:
    """A sum of per-unit gradients, each clipped to the L2 norm `clip`, that is released once and with noise.

    One unit changes the sum by at most (1 + 1e-8) C. A clipped term has the norm C at most. It is truncated towards
    zero to whole steps of 2^(e - 38), where C < 2^e <= 2 C, which does not lengthen it and takes at most 2^-37 C from
    a coordinate. Terms are added as 64-bit integers: a coordinate of a term has at most 2^38 steps, so the sum of
    fewer than 2^25 units is exact, in any order and on any device, and one unit changes it by its own term. At the
    release the sum is rounded once to float64, by at most 2^-53 of its norm, which is below 2^25 C: the sums of
    neighbouring batches are then at most C + 2 2^-28 C apart. Rounding after the noise was added is post-processing.

    In a rank of a mesh, gradients and sum are of its parts of the parameters, D elements in all, and every rank of a
    replica adds its parts of the same units in the same order. Of one process, D is `layout.size`.

    The sum takes 8 bytes for each element, and as many again at the release.

    Args:
        layout: The layout of the unsharded model.
        names: The parameters that gradients are given for, in layout order; the rest of the sum stays zero.
        clip: L2 norm C.
        device: Device of the gradients.
        weights: Where the parameters are; None for one process.
    """

    def __init__(
        self,
        layout: Layout,
        names: Sequence[str],
        clip: float,
        device: torch.device,
        weights: Weights | None = None,
    ) -> None:
        held = whole(layout) if weights is None else weights.held
        places = _placed(held)
        self._held = [places[name] for name in names]
        self._weights = weights
        self._clip = clip
        self._step = math.ldexp(1.0, math.frexp(clip)[1] - _BITS)
        self._units = 0
        self._sum: torch.Tensor | None = torch.zeros(
            sum(each.size for each in held), dtype=torch.int64, device=device
        )

    def add(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Clip the gradients of U units and add them; those that are not finite, or above 1e30 C, count as zero.

        Args:
            gradients: For each parameter (U, its shape, or that of this rank's part), floating point; they may be
                overwritten.

        Returns:
            (U,) bool, on the CPU: whether a unit's gradient was added.
        """
        if self._sum is None:
            raise AssertionError("a gradient was added after the sum was released")
        sizes = [each.size for each, _, _ in self._held]
        gradients = [
            each.reshape(len(each), size).float() for each, size in zip(gradients, sizes, strict=True)
        ]
        norms = self._norms(gradients).cpu()
        added = norms <= self._clip * _LONGEST  # false for NaN
        if not added.all():  # zero times infinity is not zero: remove them
            kept = torch.nonzero(added).flatten()
            gradients = [gradient[kept.to(gradient.device)] for gradient in gradients]
            norms = norms[kept]
        self._scale(gradients, norms)
        self._check(gradients)
        self._units += len(norms)
        _check_units(self._units)
        for (_, begin, end), gradient in zip(self._held, gradients, strict=True):
            for some in torch.split(gradient, max(1, _AT_ONCE // max(1, end - begin))):
                # A power of two scales exactly; the conversion to integers truncates towards zero.
                self._sum[begin:end] += (some * (1 / self._step)).to(torch.int64).sum(0)
        return added

    def _scale(self, gradients: Sequence[torch.Tensor], norms: torch.Tensor) -> None:
        """Scale each unit's gradient to the norm C, in place, where it is longer."""
        factors = (self._clip * (1 - _MARGIN) / norms).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factors.to(gradient.device, torch.float32)[:, None])

    def _check(self, gradients: Sequence[torch.Tensor]) -> None:
        """Raise if a clipped gradient is longer than C: a defect of this program or of the device."""
        longest = float(self._norms(gradients).max()) if len(gradients[0]) else 0.0
        if not longest <= self._clip:
            raise AssertionError(f"a clipped gradient has the norm {longest}, above {self._clip}")

    def _norms(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """L2 norms (U,) in float64, over all parameters, of gradients whose parts (U, size) are given."""
        if self._weights is None:
            return _norms(gradients)
        counted = [part for (each, _, _), part in zip(self._held, gradients, strict=True) if each.counts]
        squares = _norms(counted).square() if counted else gradients[0].new_zeros(len(gradients[0])).double()
        return self._weights.sum_in_replica(squares).sqrt()

    def so_far(self) -> torch.Tensor:
        """The sum without noise, of this replica's units, (D,) float64 on the device: private, only for `release` and
        an audit."""
        if self._sum is None:
            raise AssertionError("the sum was released before")
        return self._sum.double().mul_(self._step)

    def release(self, noise: NoiseStream, sigma: float, threads: int = 1) -> torch.Tensor:
        """The sum over all replicas with Gaussian noise of standard deviation `sigma` on every element of the named
        parameters. Noise is keyed by the element's place in the layout. The sum is deleted after this.

        Returns:
            (D,) float32, on the device.
        """
        if self._sum is not None and self._weights is not None:
            units = self._weights.sum_over_replicas(torch.tensor(self._units, device=self._sum.device))
            _check_units(int(units.item()))
            self._weights.sum_over_replicas(self._sum)
        total, self._sum = self.so_far(), None
        values = total.cpu().numpy()
        for begin, end, offset, part in _runs(self._held):
            if part is None:
                noise.add_gaussian(values[begin:end], sigma, offset, threads=threads)
            else:
                _add_to_columns(noise, values[begin:end], part, sigma, threads)
        return torch.from_numpy(values).float().to(total.device)


def _placed(held: Sequence[Held]) -> dict[str, tuple[Held, int, int]]:
    """By name each parameter, and where it begins and ends in a sum of all of them."""
    edges = itertools.pairwise(itertools.accumulate((each.size for each in held), initial=0))
    return {each.name: (each, *edge) for each, edge in zip(held, edges, strict=True)}


def _check_units(units: int) -> None:
    if units >= _MOST_UNITS:
        raise AssertionError(f"{units} units do not fit into one sum")


def _runs(held: Sequence[tuple[Held, int, int]]) -> Iterator[tuple[int, int, int, Held | None]]:
    """Elements [begin, end) of a sum, with where they begin in the flat vector. Those of several parameters are joined
    where they follow each other in both, because noise is made in blocks; a rectangle whose rows do not follow each
    other in the flat vector is given with its place."""
    begin = end = offset = 0
    for each, first, last in held:
        at = each.offset + each.rows.start * each.width
        follows = end == first and at == offset + end - begin and each.columns.size == each.width
        if not follows:
            if begin < end:
                yield begin, end, offset, None
            begin, offset = first, at
        end = last
        if each.columns.size != each.width:
            yield begin, end, offset, each
            begin = end
    if begin < end:
        yield begin, end, offset, None


def _add_to_columns(
    noise: NoiseStream, values: NDArray[np.float64], held: Held, sigma: float, threads: int
) -> None:
    """Add to the rectangle `values`, flattened, its part of the noise of the rows that it lies in."""
    part = values.reshape(held.rows.size, held.columns.size)
    at_once = max(1, _AT_ONCE // max(1, held.width))
    for first in range(0, held.rows.size, at_once):
        rows = part[first : first + at_once]
        of_rows = np.zeros((len(rows), held.width))
        offset = held.offset + (held.rows.start + first) * held.width
        noise.add_gaussian(of_rows.reshape(-1), sigma, offset, threads=threads)
        rows += of_rows[:, held.columns.start : held.columns.stop]


def _norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norms (U,) in float64 of gradients that are (U, size of a parameter) each."""
    parts = [torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64) for gradient in gradients]
    norms: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return norms


class UnitGradients(NamedTuple):
    """The results of backward passes for U units."""

    gradients: list[torch.Tensor]
    """For each trained parameter (U, its shape)."""
    nats: torch.Tensor
    """(U,) float64: summed loss."""
    tokens: NDArray[np.int64]
    """(U,): labels learned from."""


PerUnit: TypeAlias = Callable[[Sequences, NDArray[np.int64]], Iterator[UnitGradients]]
"""The gradients of some units, in order; each result is used before the next is asked for."""


class PrivateTrainer(Bench):
    """Trains any site's round of one plan by DP-SGD, on one device or in the ranks of a mesh.

    Args:
        plan: The plan; `privacy.unit` is `record` or `owner` and `privacy.sampling_rate` is set.
        model: The plan's model, which belongs to the trainer afterwards (`Bench`).
        device: Where to train.
        ranks: The mesh that the model was divided on, without sums over replicas (`parallelize`), in each of its
            ranks; every rank then calls `train` with the same arguments, and gets its span of the update.

    Raises:
        PlanError: the plan asks for a method that is wrong for its model.
    """

    dropout = True

    def __init__(
        self, plan: Plan, model: LanguageModel, device: torch.device, ranks: DeviceMesh | None = None
    ) -> None:
        assert plan.privacy.dpsgd, "only such plans are trained here"
        assert plan.privacy.sampling_rate is not None, "a sound plan has it"
        self.method = plan.privacy.method
        """How per-unit gradients are taken."""
        self._rate = plan.privacy.sampling_rate
        super().__init__(plan, model, device, ranks)
        check_method(plan, model, divided=self.weights.divided)

    def train(
        self,
        start: Vector,
        sequences: Sequences,
        *,
        round: int,
        noise: NoiseStream,
        noise_multiplier: float,
        part: Layout | None = None,
        carry: Carry | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> LocalUpdate:
        """Train `local.steps` private steps from `start` and return the change.

        Only the update's `vector` is protected. Its `tokens` and `loss` are exact figures of the batches that were
        drawn, and must not leave the site.

        Args:
            start: The global model, float32, shape (layout.size,); not modified.
            sequences: The site's training sequences, laid out in units. Without any unit every batch is empty, and the
                round is noise.
            round: The round, from 1.
            noise: The source of batches, dropout and noise: a stream that no other training uses. The difference of two
                trainings with the same noise, such as a retry of a round from other data or another model, is free of
                noise.
            noise_multiplier: z, the standard deviation of the noise on S in units of `privacy.clip`.
            part: As in `Trainer.train`.
            carry: As in `Trainer.train`. The kept state depends on noised gradients only.
            progress: Called with the number of steps taken so far, after each one.

        Raises:
            ModelError: the device has too little memory.
            StorageError: the optimizer's state cannot be read or written.
            UpdateError: `start` does not have the model's layout, or the change is not finite (which depends on
                noised gradients only).
            ValueError: the sequences are not laid out in units, or the noise multiplier is not positive and finite.
        """
        if sequences.starts is None or sequences.positions is not None:
            raise ValueError("sequences are not laid out in units: prepare them with units")
        if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
            raise ValueError(f"noise_multiplier is {noise_multiplier}: expected a positive, finite number")
        before = (round - 1) * self.plan.local.steps

        def take_steps(trained: Named, optimizer: LocalOptimizer) -> tuple[int, float]:
            mine = noise.child(f"dpsgd/round-{round}")
            with self.per_unit_gradients(trained) as gradients:
                return self._steps(
                    sequences, trained, optimizer, gradients, before, mine, noise_multiplier, progress
                )

        return self.round(start, take_steps, round=round, part=part, carry=carry)

    @contextmanager
    def per_unit_gradients(self, trained: Named) -> Iterator[PerUnit]:
        """The gradients of single units by the chosen method, before clipping; an audit adds its canaries here.

        They are private: only what `ClippedSum.release` returns may leave the site. The hooks that Opacus needs on the
        model are there until exit.

        Args:
            trained: The parameters that the round trains, in layout order.

        Yields:
            From sequences, laid out in units, and indices of units (U,) to their gradients, a few units at a time.
        """
        parameters = [parameter for _, parameter in trained]
        if self.method == "reference":
            yield partial(self._one_by_one, parameters)
            return
        with _opacus_hooks(self.module):
            yield partial(self._by_hooks, parameters)

    def new_sum(self, names: Sequence[str]) -> ClippedSum:
        """An empty sum for one step, clipped to `privacy.clip`; an audit replaces it by one that it observes.

        Args:
            names: The parameters that gradients are given for.
        """
        weights = None if type(self.weights) is Weights else self.weights
        return ClippedSum(self.model.layout, names, self.plan.privacy.clip, self.device, weights)

    def _backward(
        self, sequences: Sequences, rows: NDArray[np.int64], windows: NDArray[np.int64]
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Backward from the sum over rows (R,) of (mean loss of a row) x (its share of its unit) x (its class's
        weight).

        Args:
            sequences: All sequences.
            rows: (R,): rows of them.
            windows: (R,): windows of the unit of each row; 1 / windows is its share, unless the sequences have shares.

        Returns:
            The rows' summed losses (R,) float64, and their learned labels (R,).
        """
        task = self.task
        tokens, labels = task.drawn(
            sequences.tokens[rows], sequences.labels[rows], self.model.tokenizer, _from_torch
        )
        targets = task.targets(labels)
        if not len(rows):  # a rank without rows takes part with one that is no record's and teaches nothing
            length = sequences.tokens.shape[1]
            tokens, targets = np.zeros((1, length), np.int32), np.full((1, targets.shape[1]), NOT_LEARNED)
            windows = np.ones(1, np.int64)
        learned = task.learned(targets)
        shares = 1 / windows if sequences.shares is None or not len(rows) else sequences.shares[rows]
        factors = task.factors(targets)
        shares = shares / np.maximum(learned, 1) * (1 if factors is None else factors)
        weights = torch.from_numpy(shares).to(self.device, torch.float32)
        nats = task.row_losses(*self.forward(to_device(tokens, self.device), to_device(targets, self.device)))
        (nats @ weights).backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        return nats.detach().double(), learned

    def _one_by_one(
        self, parameters: list[nn.Parameter], sequences: Sequences, units: NDArray[np.int64]
    ) -> Iterator[UnitGradients]:
        """One unit after the other, by plain backward passes."""
        assert sequences.starts is not None
        weights, most = self.weights, self.plan.local.batch_size  # rows that go through the model at a time
        kept = Kept(self.module, self.model.written)
        for begin, end in zip(sequences.starts[units], sequences.starts[units + 1], strict=True):
            for parameter in parameters:
                parameter.grad = None
            nats, tokens = torch.zeros(1, dtype=torch.float64), 0
            for first in range(begin, end, most):
                rows = np.arange(first, min(end, first + most))
                rows = rows[weights.unit_rows(len(rows))]
                try:
                    losses, learned = self._backward(sequences, rows, np.full(len(rows), end - begin))
                except OUT_OF_MEMORY:
                    raise
                # Models raise any type, and each would reveal that the unit is there.
                except Exception as error:
                    if weights.divided:  # the other ranks of the replica wait for this one
                        raise
                    _log.warning("the model fails on a unit, which counts as 0 and %s: %s", MUST_STAY, error)
                    for parameter in parameters:
                        parameter.grad = None
                    break
                nats += losses.sum().cpu()
                tokens += int(learned.sum())
            kept.put_back()
            weights.take_gradients()
            taken = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
            yield UnitGradients([gradient[None] for gradient in taken], nats, np.array([tokens]))

    def _by_hooks(
        self, parameters: list[nn.Parameter], sequences: Sequences, units: NDArray[np.int64]
    ) -> Iterator[UnitGradients]:
        """As many whole units at a time as fit, by Opacus's hooks."""
        assert sequences.starts is not None
        sizes = sequences.starts[units + 1] - sequences.starts[units]
        for begin, end in runs(sizes.tolist(), self.plan.local.batch_size):
            windows = sizes[begin:end]
            rows = np.concatenate(
                [np.arange(sequences.starts[unit], sequences.starts[unit + 1]) for unit in units[begin:end]]
            )
            owner = np.repeat(np.arange(end - begin), windows)
            losses, learned = self._backward(sequences, rows, np.repeat(windows, windows))
            by_row = torch.from_numpy(owner).to(self.device)
            gradients = []
            for parameter in parameters:
                holder: Any = parameter
                each, holder.grad_sample, parameter.grad = holder.grad_sample, None, None
                if not (isinstance(each, torch.Tensor) and each.shape == (len(rows), *parameter.shape)):
                    raise AssertionError("Opacus gave no gradient for each row")
                if len(rows) > len(windows):
                    each = each.new_zeros(len(windows), *parameter.shape).index_add_(0, by_row, each)
                gradients.append(each)
            nats = losses.new_zeros(len(windows)).index_add_(0, by_row, losses)
            yield UnitGradients(gradients, nats, np.add.reduceat(learned, np.cumsum(windows) - windows))

    def _steps(
        self,
        sequences: Sequences,
        trained: Named,
        optimizer: LocalOptimizer,
        gradients: PerUnit,
        steps_before: int,
        noise: NoiseStream,
        noise_multiplier: float,
        progress: Callable[[int], None] | None,
    ) -> tuple[int, float]:
        """Take the round's steps; learned tokens and mean loss, of units with finite gradients."""
        local, privacy, weights = self.plan.local, self.plan.privacy, self.weights
        names, parameters = [name for name, _ in trained], [parameter for _, parameter in trained]
        places = _placed(weights.held)
        anchors = [parameter.detach().clone() for parameter in parameters] if local.proximal else []
        expected = local.batch_size * local.accumulation
        assert sequences.starts is not None
        n_units = len(sequences.starts) - 1
        nats, tokens, not_finite = 0.0, 0, 0
        for step in range(local.steps):
            own = noise.child(f"step-{step + 1}")
            batch = poisson_batch(own.child("batch"), n_units, self._rate)
            total = self.new_sum(names)
            dropout = own.child("/".join(("dropout", *weights.draws)))
            with _secret_masks(dropout, self.device) as renew:
                for some in gradients(sequences, batch[weights.units]):
                    renew()  # before the next ones go through the model
                    added = total.add(some.gradients)
                    losses = some.nats.cpu()[added]
                    nats += float(losses[torch.isfinite(losses)].sum())
                    tokens += int(some.tokens[added.numpy()].sum())
                    not_finite += int((~added).sum())
            noised = total.release(own.child("noise"), noise_multiplier * privacy.clip, local.threads)
            noised /= expected
            for name, parameter in trained:
                _, begin, end = places[name]
                parameter.grad = noised[begin:end].view_as(parameter)
            add_proximal(parameters, anchors, local.proximal)
            optimizer.step(steps_before + step)
            if progress is not None:
                progress(step + 1)
        if not_finite:
            _log.warning(
                "%d gradients of single %ss were not finite and counted as zero; the number %s",
                not_finite,
                privacy.unit,
                MUST_STAY,
            )
        figures = torch.tensor([nats, tokens], dtype=torch.float64, device=self.device)
        nats, tokens = weights.sum(figures).tolist()
        return int(tokens), nats / max(tokens, 1)


def _from_torch(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Numbers uniform in [0, 1), of torch's generator for CPUs: secret inside `_secret_masks`, as dropout."""
    return torch.rand(shape, dtype=torch.float64, device="cpu").numpy()


@contextmanager
def _secret_masks(stream: NoiseStream, device: torch.device) -> Iterator[Callable[[], None]]:
    """Let torch draw from states that come from a stream; afterwards restore the random state from before.

    `manual_seed` would not do: torch's generator for CPUs, a Mersenne Twister, uses 32 bits of a seed. Here its whole
    state of 624 words is from the stream. On a GPU the generator has a seed of 64 bits, and uses all of them.

    Yields:
        Goes on with new states, which do not depend on what was drawn before.
    """
    words, cuda = stream.generator(), [device] if device.type == "cuda" else []

    def renew() -> None:
        state = torch.Generator().get_state()
        # After the seed and two counters, of 8 bytes each, there is a word in the lower half of each 8 bytes.
        state.view(torch.int64)[3:627] = torch.from_numpy(words.integers(2**32, size=624))
        torch.default_generator.set_state(state)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(int(words.integers(2**64, dtype=np.uint64)))

    with torch.random.fork_rng(devices=cuda):
        renew()
        yield renew


@contextmanager
def _opacus_hooks(module: nn.Module) -> Iterator[None]:
    """Let backward passes leave `grad_sample` (rows, shape) on every parameter that is trained."""
    with warnings.catch_warnings():
        # Torch warns of a layer whose input needs no gradient, such as the first; its hook is right.
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        from opacus.grad_sample import GradSampleModule  # the import takes a second

        hooked = GradSampleModule(module, loss_reduction="sum")
        try:
            yield
        finally:
            hooked.to_standard_module()
