"""The error of a background save, as soon as it happens.

orbax tells of it through its response, which on several processes comes only after a barrier: the process that failed
waits there for the others, and they wait, in another barrier, for its part, all of them for twenty minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class BackgroundErrors:
    """Listens to what one orbax checkpointer writes in the background.

    A thread of orbax is handed futures of what is being written and a function that completes the checkpoint; both are
    wrapped here. There is no public place for that: the full disk in `tests/train/test_multi_process.py` fails where a
    release of orbax moves these.

    Args:
        checkpointer: `ocp.training.Checkpointer`.

    Attributes:
        error: of the save that is being written; None = none so far.
    """

    def __init__(self, checkpointer: Any):
        self.error: BaseException | None = None
        manager = checkpointer._manager
        save = manager.save

        def listening(*arguments: Any, **options: Any) -> Any:
            self.error = None
            self._listen_to(manager._checkpointer._async_manager)  # every save has its own
            return save(*arguments, **options)

        manager.save = listening

    def _listen_to(self, writer: Any) -> None:
        start = writer.start_async_commit

        def listening(directory: Any, commit_futures: Sequence[Any], on_commit_callback: Callable[[], None]) -> None:
            watched = [_Watched(each, self._call) for each in commit_futures]
            start(directory, watched, lambda: self._call(on_commit_callback))

        writer.start_async_commit = listening

    def _call(self, action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return action(*arguments, **options)
        except BaseException as error:
            self.error = error
            raise


class _Watched:
    """A future whose error is told to the listener."""

    def __init__(self, future: Any, call: Callable[..., Any]):
        self._future, self._call = future, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)

    def result(self, *arguments: Any, **options: Any) -> Any:
        return self._call(self._future.result, *arguments, **options)
