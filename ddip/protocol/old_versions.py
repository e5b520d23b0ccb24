"""Stand-ins for what old versions of IPython, ipykernel and psutil lack.

Colab and Kaggle pin IPython 7.34, ipykernel 6.17.1 and psutil 5.9.5. Each stand-in says from which version on it is
not needed, so that it can be removed once that version is ddip's lowest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from io import StringIO
from typing import Any


class RequestBuffers:
    """A mixin for ``OutStream`` that keeps text by request; not needed from ipykernel 6.29 on.

    In earlier releases, a stream has a single buffer, which ``_buffer`` replaces by that of the current request.
    """

    parent_header: dict[str, Any]
    _buffer_lock: Any
    _by_header: defaultdict[Any, StringIO]

    @property
    def _buffer(self) -> StringIO:
        return self._by_header[frozenset(self.parent_header.items())]

    @_buffer.setter
    def _buffer(self, _: StringIO) -> None:
        self._by_header = defaultdict(StringIO)

    def _flush_buffers(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Return the text of each request with its header, and empty the buffers."""
        with self._buffer_lock:
            buffers, self._by_header = self._by_header, defaultdict(StringIO)
        return ((dict(header), buffer.getvalue()) for header, buffer in buffers.items())


def keep_cell_numbers(compiler: Any) -> None:
    """Make IPython's compiler keep the number of each cell by its file name. Not needed from IPython 8 on."""
    if hasattr(compiler, "_filename_map"):
        return
    cache, numbers = compiler.cache, dict[str, int]()

    def cache_and_remember(transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name: str = cache(transformed_code, number, raw_code)
        numbers[name] = number
        return name

    compiler.cache, compiler._filename_map = cache_and_remember, numbers


def find_comms(kernel: Any) -> tuple[Any, Any]:
    """Return the comm manager of the notebook's kernel, and the function that creates a comm.

    From ipykernel 6.18 on these are those of the package ``comm``, of which earlier kernels know nothing.
    """
    from ipykernel._version import version_info

    if kernel is not None and tuple(version_info[:2]) < (6, 18):
        from ipykernel.comm import Comm

        return kernel.comm_manager, Comm
    import comm

    return comm.get_comm_manager(), comm.create_comm


def tcp_connections(process: Any, kind: str = "tcp") -> list[Any]:
    """Return the open connections of a ``psutil.Process``. Before psutil 6.0 the method had another name."""
    return list((process.net_connections if hasattr(process, "net_connections") else process.connections)(kind))
