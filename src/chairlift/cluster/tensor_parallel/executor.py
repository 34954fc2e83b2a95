"""TensorParallelExecutor: runs each step on all ranks; the engine sees one executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chairlift.cluster.tensor_parallel.ranks import Ranks
from chairlift.core.step import Bits, Step, StepResult
from chairlift.execution.executor import LaunchedStep, TorchExecutor


class TensorParallelExecutor:
    """Sends each call to the other ranks and makes it on rank 0.

    Any error ends the ranks: one of them may wait in the middle of a step for one that has left it.
    """

    def __init__(self, executor: TorchExecutor, ranks: Ranks) -> None:
        self._executor, self._ranks = executor, ranks

    def launch(self, step: Step) -> LaunchedStep:
        """Start one forward pass."""
        with self._all_ranks():
            self._ranks.send({"launch": step.plain(chooses=False)})
            return self._executor.launch(step)

    def choose(self, launched: LaunchedStep, masks: list[Bits | None]) -> None:
        """Choose the tokens of a step's masked samples; only rank 0 needs the masks."""
        with self._all_ranks():
            self._ranks.send({"choose": len(masks)})
            self._executor.choose(launched, masks)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Wait for a step and return its results."""
        with self._all_ranks():
            result = self._executor.collect(launched)
            self._ranks.check()  # NCCL operations that were aborted complete with wrong results
            return result

    @contextmanager
    def _all_ranks(self) -> Iterator[None]:
        watch = self._ranks.watch
        watch.begin()
        try:
            yield
        except Exception as error:
            raise self._ranks.lose(error) from error
        except BaseException as error:  # such as Ctrl-C: the other ranks are in the middle of a step
            watch.fail(f"a step was interrupted by {type(error).__name__}")
            raise
        finally:
            watch.end()
