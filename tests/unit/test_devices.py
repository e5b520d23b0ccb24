"""The GPUs that the notebook sees."""

from __future__ import annotations

import pytest

from ddip.cluster.devices import visible_names


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("2, 0", ["2", "0"]),
        ("1,9,2", ["1"]),
        ("-1", []),
        ("0,-1,2", ["0"]),
        ("0,0", []),
        ("GPU-8932f937,1", ["GPU-8932f937"]),
        ("GPU-1,GPU-2", ["GPU-1", "GPU-2"]),
        ("MIG-8932f937", ["MIG-8932f937"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, names: list[str]) -> None:
    assert visible_names(visible, 4) == names
