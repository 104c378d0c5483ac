"""Revive: dead experts, codes, latents, ranks and neurons start again, each by the way published for its kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rekindle.diagnosis.usage import COVERED, FAINT, Usage, coverage, pair, tensor_of
from rekindle.isolation import Recorded, isolated, padding_mask
from rekindle.isolation import call as run
from rekindle.methods.call import Call
from rekindle.methods.changes import Changes
from rekindle.methods.redo import ReDo
from rekindle.methods.remedy import Observation, Remedy
from rekindle.optimizers import StateReset
from rekindle.projection.method import Batch
from rekindle.projection.receipt import Receipt
from rekindle.recording.ancestry import Slices
from rekindle.recording.recorder import called_parts
from rekindle.recording.sights import Sightings
from rekindle.recording.stacks import UnitStack
from rekindle.recording.wiring import WiringError

_KEPT, _EVERY = 8, 7  # batches that `observe` keeps, and one in so many training passes
_EXAMPLES = 8192
_NOISE = 0.01  # by how much of its spread a copy differs
_WAKING = 0.03  # share of examples on which a new latent of a choice is above zero
_APART = 4.0  # the spread of the difference between the scores of two copies


class Revive(Remedy):
    """Redraw the units of every kind that were never used: ReDo (Sokar et al., 2023) for all that dies.

    - codes of a quantizer start at examples drawn from the batches; EMA counts become 1, EMA sums follow.
    - latents of a sparse autoencoder start at what is left of badly reconstructed examples (Bricken et al., 2023):
      decoder and encoder point there, with the mean norm of the living (0.2 of it in an encoder without TopK; with one,
      as much as gives back what was left, and a bias that keeps it silent on 97% of the examples).
    - experts become copies of the most loaded one with 1% of noise; the router rows of all copies are moved apart, so
      that they share its tokens.
    - ranks of an adapter start again: a new row in A, zeros in B, as at its start. With `merge` all of them do, and
      what they have learned goes into the base weight first (ReLoRA, Lialin et al., 2023).
    - neurons are recycled by ReDo.

    Units are found on the first batch (`rekindle.health` shows them). Batches are those of the call, or some that
    `observe` has seen. Where they are too few to tell dead from rare, nothing is changed and the receipt says so.

    >>> class Quantizer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.codes = Parameter(torch.cat([torch.randn(4, 2), torch.full((4, 2), 99.0)]))
    ...     def forward(self, x):
    ...         return self.codes[torch.cdist(x, self.codes).argmin(-1)]
    >>> Revive()(Quantizer(), batches=[torch.randn(64, 2)]).totals()["counts"]["codes"]
    4

    Args:
        tau: ReDo's threshold for neurons; None leaves neurons as they are.
        merge: All ranks of adapters start again, after they were merged into the base weight.
        units: Kinds by hand, {"codebook.embed": "codes"}; None as the kind leaves a stack out.
        seed: Of what is drawn where the call has no generator.
    """

    name = "revive"
    batches = "any"
    atomic = True

    def __init__(
        self,
        *,
        tau: float | None = 0.0,
        merge: bool = False,
        units: Mapping[str, str | None] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        self.tau, self.merge = tau, merge
        self._units = dict(units or {})
        self._seen: deque[Batch] = deque(maxlen=_KEPT)
        self._passes = -1

    def observe(self, model: nn.Module, batches: Iterable[Batch] | None = None) -> Observation:
        """Keep the inputs of one in seven training passes, the last eight of them, to look at when it acts.

        Where the model is not called itself, those of its parts that are.
        """
        inside: list[nn.Module] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inside.append(module)
            if len(inside) == 1 and module.training and torch.is_grad_enabled():
                self._passes += 1
                if self._passes % _EVERY == 0:
                    self._seen.append(Recorded(args, kwargs, None if module is model else module))

        def leave(module: nn.Module, args: Sequence[Any], output: Any) -> None:
            inside.pop()

        def hooks() -> Iterator[Any]:
            for module in (model, *called_parts(model)):
                yield module.register_forward_pre_hook(enter, with_kwargs=True)
                yield module.register_forward_hook(leave, always_call=True)

        return Observation(hooks())

    def apply(self, call: Call) -> Receipt:
        """Count the use, redraw what is dead, and report."""
        batches = list(self._seen if call.batches is None else call.batches)
        if not batches:
            raise ValueError("Revive looks at batches: give batches=, or train inside observe(model)")
        usage = Usage.of(call.inner, batches, self._units)
        examples = _Examples(usage)
        with isolated(call.inner), torch.no_grad(), usage.watching(), examples.watching():
            for batch in batches:
                usage.mask = padding_mask(batch)
                run(call.inner, batch)
        usage.add_up(call.total)
        changes, skipped = Changes(call), dict(usage.found.unmeasured)
        for stack in usage.stacks():
            if stack.kind == "rows":
                continue
            reason = stack.refusal or self._revive(call, stack, usage, examples, changes)
            if reason:
                skipped[stack.name] = reason
        receipt = changes.write(self.name, skipped)
        return receipt if self.tau is None else self._neurons(call, usage, batches, receipt)

    def _revive(self, call: Call, stack: UnitStack, usage: Usage, examples: _Examples, changes: Changes) -> str:
        """Note what becomes of the dead units of a stack; why nothing, where that has a reason."""
        if stack.kind == "ranks":
            _ranks(call, stack, changes, self.merge)
            return ""
        counts, uses = usage.uses[stack.name].counts, float(usage.uses[stack.name].counts.sum())
        if not uses:
            return "it did not run on these batches"
        if coverage(counts) < COVERED:
            return f"{uses:,.0f} uses are too few to tell dead units from rare ones"
        faint = FAINT * uses / stack.size if stack.kind == "experts" else 1
        dead = (counts < faint).nonzero().flatten()
        if len(dead):
            redraw = {"codes": _codes, "latents": _latents, "experts": _experts}[stack.kind]
            return redraw(call, stack, dead, examples, changes)
        return ""

    def _neurons(self, call: Call, usage: Usage, batches: list[Batch], receipt: Receipt) -> Receipt:
        """Recycle neurons, but for latents, which are neurons of their encoder."""
        latents = {member.tensor.rpartition(".")[0] for s in usage.stacks() for member in s.holds.values()}
        try:
            names = [group.name for group in ReDo().wiring(call.inner, batches) if group.name not in latents]
        except WiringError as error:
            if any(stack.kind != "rows" for stack in usage.stacks()):
                return receipt
            raise WiringError(f"there are no experts, codes, latents or ranks, and no neurons: {error}") from error
        if not names or self.tau is None:
            return receipt
        more = ReDo(self.tau, targets=names)(call.model, call.optimizer, batches=batches, generator=call.generator)
        return replace(
            receipt,
            records=(*receipt.records, *more.records),
            skipped={**more.skipped, **receipt.skipped},
            optimizer=(receipt.optimizer or StateReset("rows")) + (more.optimizer or StateReset("rows")),
            gradients_cleared=receipt.gradients_cleared + more.gradients_cleared,
            notes=(*receipt.notes, *more.notes),
        )


class _Examples:
    """What the members of each stack were compared with, and what was made of them: rows of vectors."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self.inputs: dict[str, list[Tensor]] = {stack.name: [] for stack in usage.found.stacks}
        self.outputs: dict[str, list[Tensor]] = {stack.name: [] for stack in usage.found.stacks}

    def watching(self) -> Any:
        """Gathers inside."""
        looks = {}
        for stack in self.usage.found.stacks:
            for sight, rows in ((stack.inputs, self.inputs[stack.name]), (stack.outputs, self.outputs[stack.name])):
                if sight is not None:
                    looks[sight] = partial(self._take, stack, rows)
        return Sightings(self.usage.model, looks) if looks else nullcontext()

    def _take(self, stack: UnitStack, rows: list[Tensor], value: Tensor) -> None:
        if sum(map(len, rows)) < _EXAMPLES:
            width = value.shape[-1]
            if stack.books > 1 and value.shape[0] == stack.books:
                rows.append(value.detach().movedim(0, -2).reshape(-1, stack.books, width).clone())
            else:
                rows.append(value.detach().reshape(-1, width).clone())

    def of(self, stack: UnitStack) -> Tensor:
        """The inputs, (examples, …, in)."""
        return torch.cat(self.inputs[stack.name])

    def left(self, stack: UnitStack) -> Tensor:
        """What was not reconstructed, but for its mean, which a bias adds: (examples, in)."""
        rest = self.of(stack) - torch.cat(self.outputs[stack.name])
        return rest - rest.mean(0)


def _pick(call: Call, weights: Tensor, amount: int) -> Tensor:
    """Numbers of examples, drawn with these weights; each once where there are enough of them."""
    generator = call.generator
    repeat = int((weights > 0).sum()) < amount
    return torch.multinomial(weights.to(generator.device).float(), amount, repeat, generator=generator)


def _noise(call: Call, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=call.generator, device=call.generator.device).to(like)


def _codes(call: Call, stack: UnitStack, dead: Tensor, examples: _Examples, changes: Changes) -> str:
    """Codes at examples; where these are fewer, a second one a little beside."""
    member, several = stack.holds["codes"], stack.books > 1
    table = tensor_of(call.inner, member.tensor)
    if several and isinstance(table, Parameter) and call.optimizer is not None:
        return "several codebooks are one parameter: an optimizer's state cannot be reset for codes of one of them"
    size = stack.size // stack.books
    seen = examples.of(stack)
    parts = []
    for book in range(stack.books):
        amount = int(((dead >= book * size) & (dead < (book + 1) * size)).sum())
        rows = seen[:, book] if seen.ndim > 2 else seen
        if len(rows) < amount:
            rows = rows.repeat(-(-amount // len(rows)), 1)
            rows = rows + _NOISE * rows.std() * _noise(call, rows)
        if amount:
            parts.append(rows[_pick(call, torch.ones(len(rows)), amount).to(rows.device)])
    new = call.first({"codes": torch.cat(parts)})["codes"]
    lead = () if several else (1,) * (table.ndim - 2)
    changes.add(member, dead, new.view(*lead, *new.shape), several)
    changes.count(member, codes=len(dead))
    owner = member.tensor.rpartition(".")[0]
    for name, buffer in call.inner.get_submodule(owner).named_buffers(owner, recurse=False):
        if name == member.tensor or not buffer.is_floating_point():
            continue
        if buffer.shape == table.shape:  # sums over what was assigned
            changes.add(Slices(name, member.axis), dead, new.view(*lead, *new.shape), several)
        elif buffer.shape == table.shape[:-1]:  # how much that was
            changes.add(Slices(name, member.axis), dead, 1.0, several)
    return ""


def _latents(call: Call, stack: UnitStack, dead: Tensor, examples: _Examples, changes: Changes) -> str:
    """Latents at what is left of badly reconstructed examples.

    Of those that are chosen by size, one must not take the place of others on many examples: its bias leaves it silent
    but on the few along its direction, and on the first of these it gives back as much as was left.
    """
    left = examples.left(stack)
    chosen = left[_pick(call, left.square().sum(-1), len(dead)).to(left.device)]
    living = torch.ones(stack.size, dtype=torch.bool).index_fill(0, dead, len(dead) == stack.size)
    rows = nn.functional.normalize(chosen + _NOISE * chosen.std() * _noise(call, chosen), dim=-1)
    new: dict[str, Tensor] = {}
    for role, share in (("decoder", 1.0), ("encoder", 1.0 if stack.gated else 0.2)):
        member = stack.holds[role]
        weight = tensor_of(call.inner, member.tensor).detach().movedim(member.axis, 0)
        new[role] = rows * weight[living.to(weight.device)].norm(dim=-1).mean().to(rows) * share
    biases = [role for role in stack.holds if role.startswith("bias")]
    if stack.gated and biases:
        along = examples.of(stack) @ rows.mT
        few = along.topk(min(len(along), max(2, int(_WAKING * len(along)))), 0).values
        size = chosen.norm(dim=-1) / new["decoder"].norm(dim=-1)
        factor = size / (few[0] - few[-1]).clamp_min(_NOISE * few[0].abs() + 1e-12)
        new |= {"encoder": rows * factor[:, None], biases[0]: -factor * few[-1]}
    new = call.first(new)
    changes.count(stack.holds["encoder"], latents=len(dead))
    for role, member in stack.holds.items():
        own = tensor_of(call.inner, member.tensor).detach()
        if role in new:
            changes.add(member, dead, new[role].movedim(0, member.axis) if own.ndim > 1 else new[role])
        elif role.startswith("vector") and len(dead) < stack.size:
            changes.add(member, dead, float(own[living.to(own.device)].mean()))
        else:
            changes.add(member, dead, 0.0)
    return ""


def _experts(call: Call, stack: UnitStack, dead: Tensor, examples: _Examples, changes: Changes) -> str:
    """Copies of the experts that are most often the first choice, each for the tokens on its side of a random plane."""
    router = stack.holds["router"]
    weight = tensor_of(call.inner, router.tensor).detach().movedim(router.axis, 0)
    biases = [member for role, member in stack.holds.items() if role.startswith("bias")]
    added = {member: tensor_of(call.inner, member.tensor).detach().clone() for member in biases}
    rows = examples.of(stack).to(weight)
    firsts = (rows @ weight.mT + sum(added.values())).argmax(-1)
    load = call.total([torch.bincount(firsts, minlength=stack.size).double().cpu()])[0]
    source, shared = torch.empty_like(dead), torch.ones_like(load)
    for place in range(len(dead)):
        source[place] = most = int((load / shared).argmax())
        shared[most] += 1
    copied = torch.tensor(sorted({*source.tolist()}))
    moved, of = torch.cat([dead, copied]), torch.cat([source, copied]).to(weight.device)
    mean = rows.mean(0)
    planes = _noise(call, weight[of])
    planes = planes - (planes @ mean / mean.square().sum().clamp_min(1e-12))[:, None] * mean
    planes = _APART * planes / (rows @ planes.mT).std(0).clamp_min(1e-12)[:, None]
    drawn = call.first({"router": weight[of] + planes})
    changes.add(router, moved, drawn["router"].movedim(0, router.axis))
    changes.count(router, experts=len(dead))
    for member, value in added.items():
        changes.add(member, moved, value[of])
    for role, member in stack.holds.items():
        if role == "modules":
            _modules(call, member, dead, source, changes)
        elif role != "router" and member not in added:
            value = tensor_of(call.inner, member.tensor).detach()
            copies = value[source.to(value.device)]
            copies = copies + _NOISE * value.std() * _noise(call, copies)
            changes.add(member, dead, call.first({"rows": copies})["rows"])
    return ""


def _modules(call: Call, member: Slices, dead: Tensor, source: Tensor, changes: Changes) -> None:
    """The same for experts that are modules of a list."""
    experts = dict(call.inner.get_submodule(member.tensor).named_children())
    names = list(experts)
    for to, of in zip(dead.tolist(), source.tolist(), strict=True):
        for name, value in (*experts[names[of]].named_parameters(), *experts[names[of]].named_buffers()):
            new = value.detach()
            if value.is_floating_point() and isinstance(value, Parameter) and value.numel() > 1:
                new = call.first({"new": new + _NOISE * new.std() * _noise(call, new)})["new"]
            if value.ndim:
                changes.add(Slices(f"{member.tensor}.{names[to]}.{name}", 0), torch.arange(len(value)), new)


def _ranks(call: Call, stack: UnitStack, changes: Changes, merge: bool) -> None:
    """Ranks as an adapter begins: nothing in B, a new draw in A."""
    a, b = pair(call.inner, stack)
    size = a.norm(dim=1) * b.norm(dim=0)
    if not float(size.max()):
        return  # not trained yet
    dead = torch.arange(len(size)) if merge else (size <= FAINT * size.max()).nonzero().flatten().cpu()
    if not len(dead):
        return
    if merge:
        base = stack.holds["base"].tensor
        weight = tensor_of(call.inner, base).detach()
        moved = stack.factor * (b.double() @ a.double()).to(weight)
        moved = moved if stack.holds["base"].axis == 0 else moved.mT
        changes.add(Slices(base, 0), torch.arange(len(weight)), weight + moved)
        changes.notes.append(f"{stack.name}: merged into {base}: a file of the adapter alone is no longer the model")
    bound = a.std() * 3**0.5
    drawn = (torch.rand(len(dead), a.shape[1], generator=call.generator, device=call.generator.device) * 2 - 1).to(a)
    new = call.first({"a": drawn * bound})["a"]
    down, up = stack.holds["down"], stack.holds["up"]
    changes.add(down, dead, new.movedim(0, down.axis))
    changes.count(down, ranks=len(dead))
    changes.add(up, dead, 0.0)
