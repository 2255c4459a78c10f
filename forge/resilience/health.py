"""NaN detection, and checks of the devices a job runs on.

Shapes: a loss is a scalar (or is judged element by element); flags are int32[n], reduced by MAX or
MIN.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from forge import messages
from forge.process import sections
from forge.process.progress import Section
from forge.resilience.elastic import largest_count

__all__ = ["NaNDetector", "NaNState", "check_gpu_health", "check_nccl_health"]

_HAS_BFLOAT16 = (8, 0)
"""From this compute capability on, NVIDIA's GPUs multiply it."""

ACTIONS = ("warn", "skip", "raise")


@dataclass
class NaNState:
    """What a detector has seen."""

    consecutive_nans: int = 0
    total_nans: int = 0
    last_good_loss: float = float("inf")
    last_good_step: int = 0
    nan_steps: list[int] = field(default_factory=list)
    """The bad steps, the newest `max_history` of them."""


class NaNDetector:
    """Counts NaN and Inf, and says so, skips or raises; all ranks agree.

    Args:
        action: warn (say so) | skip (be quiet; the caller skips the step) | raise.
        max_consecutive: Bad steps in a row after which `should_rollback` is true.
        max_history: How many indices of bad steps are kept.
    Raises:
        ValueError: For an unknown action.
    """

    def __init__(
        self, action: str = "warn", max_consecutive: int = 5, max_history: int = 100
    ) -> None:
        if action not in ACTIONS:
            raise ValueError(f"Invalid NaN action: {action!r}; expected {' | '.join(ACTIONS)}")
        self.action = action
        self.max_consecutive = max_consecutive
        self.max_history = max_history
        self._step: int | None = None
        self.reset()

    def check_loss(self, loss: torch.Tensor | float, step: int) -> bool:
        """Check the loss; one host synchronisation.

        Args:
            loss: A number or a tensor; bad if any element is not finite.
            step: The step it belongs to.
        Returns:
            Whether it is finite on all ranks.
        Raises:
            RuntimeError: If it is not, and the action is `raise`.
        """
        value, device = float(mean(loss).item()), None
        if isinstance(loss, torch.Tensor):
            device = loss.device
        is_bad = any_rank(flag=not math.isfinite(value), device=device)
        self.record(is_bad=is_bad, step=step)
        if not is_bad:
            self.state.last_good_loss = value
        else:
            where = value if not math.isfinite(value) else "on another rank"
            self._act(f"NaN/Inf loss at step {step}: {where}")
        return not is_bad

    def check_gradients(self, model: torch.nn.Module, step: int) -> bool:
        """Check the gradients; one host synchronisation.

        Args:
            model: The module whose parameters have them.
            step: The step they belong to.
        Returns:
            Whether every gradient is finite on all ranks.
        Raises:
            RuntimeError: If one is not, and the action is `raise`.
        """
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        culprits = []
        if named and not math.isfinite(float(total_norm([g for _, g in named]).item())):
            culprits = non_finite(named)
        is_bad = any_rank(flag=bool(culprits), device=named[0][1].device if named else None)
        if is_bad:
            self.record(is_bad=True, step=step, is_same_step=step == self._step)
            where = ", ".join(culprits[:3]) or "on another rank"
            self._act(f"NaN/Inf gradient at step {step}: {where}")
        return not is_bad

    def _act(self, message: str) -> None:
        if self.action == "raise":
            raise RuntimeError(message)
        if self.action == "warn":
            messages.warn(message)

    def record(self, *, is_bad: bool, step: int, is_same_step: bool = False) -> None:
        """Count one verdict.

        A step is bad if one of its verdicts is: a good loss must not end the streak of a step
        whose gradients turn out to be bad, nor may one step count twice.

        Args:
            is_bad: The verdict.
            step: The step it belongs to.
            is_same_step: Whether the last verdict was about this step, too.
        """
        state = self.state
        if not is_same_step:
            self._step, self._streak_before, self._is_bad = step, state.consecutive_nans, False
        if self._is_bad:
            return
        if not is_bad:
            state.consecutive_nans = 0
            state.last_good_step = step
            return
        self._is_bad = True
        state.consecutive_nans = self._streak_before + 1
        state.total_nans += 1
        state.nan_steps.append(step)
        del state.nan_steps[: -self.max_history or None]

    @property
    def should_rollback(self) -> bool:
        """Ask whether the streak is long enough to go back.

        Returns:
            Whether `max_consecutive` steps in a row were bad.
        """
        return self.state.consecutive_nans >= self.max_consecutive

    def reset(self) -> None:
        """Forget everything seen so far."""
        self.state = NaNState()
        self._step = None
        self._streak_before = 0
        self._is_bad = False


def any_rank(*, flag: bool, device: torch.device | None = None) -> bool:
    """Whether `flag` is set on any rank, so that none steps alone."""
    return bool(largest_of_ranks([flag], device)[0])


def largest_of_ranks(values: list[int], device: torch.device | None = None) -> list[int]:
    """The largest of each that any rank has; a collective where there are several."""
    if place()[1] == 1:
        return values
    agreed = torch.tensor(values, dtype=torch.int32, device=_meeting_device(device))
    with sections.current().inside(Section.collective):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.tolist()


def finite_on_all_ranks(value: torch.Tensor) -> Callable[[], bool]:
    """Begin to find out whether a number is finite on every rank.

    Returns:
        What waits for the answer: the only host synchronisation. Until then the ranks' collective
        is under way beside what this one does; where there is one rank there is none.
    """
    if place()[1] == 1:
        return lambda: math.isfinite(value.item())
    is_finite = value.isfinite().to(_meeting_device(value.device), torch.int32)
    work = dist.all_reduce(is_finite, op=dist.ReduceOp.MIN, async_op=True)

    def answer() -> bool:
        with _waiting_for(work):
            work.wait()
            return bool(is_finite.item())

    return answer


def _waiting_for(work: Any) -> contextlib.AbstractContextManager[None]:
    if work.is_completed():
        return contextlib.nullcontext()
    return sections.current().inside(Section.collective)


def place() -> tuple[int, int]:
    """This rank, and how many there are."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    return (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())


def _meeting_device(device: torch.device | None) -> torch.device:
    """Where the ranks' collectives take a value from that lies on `device`.

    There, if the device has a backend of its own (`cpu:gloo,cuda:nccl`): the host need not wait.
    """
    backends = _backends()
    on_host = backends.get("cpu")
    if device is not None and backends.get(device.type, on_host) != on_host:
        return device
    return torch.device("cuda" if on_host is None else "cpu")


def _backends() -> dict[str, str]:
    """Type of device -> the backend that the default group has for it."""
    return dict(one.split(":") for one in str(dist.get_backend_config()).split(","))


def widest(device: torch.device) -> torch.dtype:
    """The widest float of a device; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def mean(loss: torch.Tensor | float) -> torch.Tensor:
    """A loss as one number on its device; not finite if any element is not."""
    if not isinstance(loss, torch.Tensor):
        return torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    loss = whole(loss.detach())
    if loss.numel() == 1:
        return loss
    return loss.to(widest(loss.device)).mean()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor as the tensor that all its ranks have then, a collective; any other as it is."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those that torch can compute with together: plain ones, and the DTensors of each mesh."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all gradients: a scalar tensor, with no host synchronisation.

    Of sharded ones it is that of the whole, a collective.
    """
    values = [g.coalesce().values() if g.layout is torch.sparse_coo else g for g in grads]
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh(values)]
    return norms[0] if len(norms) == 1 else _norm_of(norms)


def exact_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """The same where squares would overflow in the gradients' own dtype."""
    return _norm_of([whole(torch.linalg.vector_norm(g, dtype=widest(g.device))) for g in grads])


def _norm_of(norms: list[torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms])
    )
    return found


def clip(
    parameters: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor | None = None
) -> None:
    """Scale their gradients to an L2 norm of `max_norm` at most; `norm` is theirs, if known."""
    if norm is None:
        norm = total_norm([p.grad for p in parameters if p.grad is not None])
    for group in by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def non_finite(named: list[tuple[str, torch.Tensor]]) -> list[str]:
    """The gradients that hold NaN or Inf, each with how many; exact, and one look each.

    Of sharded ones this rank's part: no collective, in which a rank might not come.
    """
    found = []
    for name, given in named:
        grad = given.to_local() if hasattr(given, "to_local") else given
        values = grad.coalesce().values() if grad.layout is torch.sparse_coo else grad
        num_nan = int(torch.isnan(values).sum().item())
        num_inf = int(torch.isinf(values).sum().item())
        if num_nan or num_inf:
            found.append(f"{name} ({num_nan} NaN, {num_inf} Inf of {values.numel()})")
    return found


def check_gpu_health(device: int = 0) -> dict[str, Any]:
    """Check whether a CUDA device answers, computes and allocates.

    Args:
        device: Its number, as CUDA counts.
    Returns:
        cuda_available, device_accessible, compute_ok, memory_ok (bool) and error (str, empty
        where nothing failed).
    """
    result: dict[str, Any] = {
        "cuda_available": torch.cuda.is_available(),
        "device_accessible": False,
        "compute_ok": False,
        "memory_ok": False,
        "error": "",
    }
    if not result["cuda_available"]:
        result["error"] = "CUDA is not available"
        return result
    try:
        where = torch.device("cuda", device)
        torch.cuda.get_device_properties(where)
        result["device_accessible"] = True
        a = torch.arange(64 * 64, dtype=torch.float32, device=where).reshape(64, 64) % 7
        # Small integers: exact in float32 whatever the order of the sums. In bfloat16 all up to 256
        # are, and ones and zeros add up to 64 at most.
        products = [a]
        if torch.cuda.get_device_capability(where) >= _HAS_BFLOAT16:
            products.append((a % 2).bfloat16())
        wrong = [one.dtype for one in products if not _is_product_right(one)]
        result["compute_ok"] = not wrong
        if wrong:
            named = " and ".join(str(one).removeprefix("torch.") for one in wrong)
            result["error"] = f"cuda:{device} computed a wrong matrix product in {named}"
        block = torch.full((16 << 20,), 0xA5, dtype=torch.uint8, device=where)
        result["memory_ok"] = bool((block == 0xA5).all().item())
        if not result["memory_ok"]:
            result["error"] = f"cuda:{device} did not keep what was written to its memory"
    except (RuntimeError, AssertionError, ValueError) as error:
        result["error"] = f"cuda:{device}: {error}"
    return result


def _is_product_right(matrix: torch.Tensor) -> bool:
    """Whether its device multiplies it with its transpose as the CPU does, which is exact."""
    host = matrix.cpu().float()
    return torch.equal((matrix @ matrix.T).cpu().float(), host @ host.T)


def own_devices() -> list[int]:
    """The visible CUDA devices that are this task's; asking opens no context.

    Where the tasks of a node all see the same devices each of them has its share, by its local
    rank (torchrun's, or Slurm's in a step): what the others train on is not to be touched.
    """
    count, env = torch.cuda.device_count(), os.environ
    rank = largest_count(env.get("LOCAL_RANK") or env.get("SLURM_LOCALID"), 0)
    tasks = env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_STEP_TASKS_PER_NODE")
    share = max(count // max(largest_count(tasks, 1), 1), 1)
    first = rank * share % max(count, 1)
    return list(range(first, min(first + share, count)))


def check_nccl_health(timeout_sec: float = 10.0) -> bool:
    """Check an all-reduce over all ranks, on any backend (nccl, gloo).

    Args:
        timeout_sec: Seconds after which it has failed.
    Returns:
        Whether it came back right in time; True where torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return True
    is_cuda = _backends().get("cuda") == "nccl"
    device = torch.device("cuda", _own_device()) if is_cuda else torch.device("cpu")

    answers = []

    def reduce() -> None:
        try:
            ones = torch.ones(1, device=device)
            work = dist.all_reduce(ones, async_op=True)
            work.wait(timedelta(seconds=timeout_sec))
            answers.append(int(ones.item()) == dist.get_world_size())
        except Exception as error:  # noqa: BLE001 - a failed check is an answer, and logged
            messages.warn(f"health check failed: {error}")

    thread = threading.Thread(target=reduce, name="forge-health", daemon=True)
    thread.start()
    thread.join(timeout_sec)  # NCCL's own wait ends when the GPU has the sum, or never
    return answers == [True]


def _own_device() -> int:
    """The current device where it is this task's: in a thread that has chosen none it is 0."""
    own, current = own_devices(), torch.cuda.current_device()
    return current if current in own or not own else own[0]
