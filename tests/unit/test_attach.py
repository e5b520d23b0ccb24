"""Attaching to foreign clusters: which cluster is meant, how many ranks a host gets, what the page shows."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ddip.cluster.attach import clusters, far_end
from ddip.cluster.attach.far_end import Link
from ddip.cluster.ipyparallel import launcher_engines
from ddip.cluster.reach import Attachment, Seat
from ddip.errors import BadInput, GroupError

SEATS = (Seat("h2", (0, 2), "python"), Seat("h1", (1,), "python"))
PAGE = Path(__file__).parents[2] / "docs" / "attach.md"


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an IPython folder with the files of two clusters that do not run."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for profile, name in (("default", "ipcontroller-client.json"), ("big", "ipcontroller-one-two-client.json")):
        folder = tmp_path / f"profile_{profile}" / "security"
        folder.mkdir(parents=True)
        connection = {"interface": "tcp://127.0.0.1", "registration": 1, "location": "here"}
        (folder / name).write_text(json.dumps(connection))
    return tmp_path


def test_clusters_are_known_by_profile_and_id(profiles: Path) -> None:
    assert [found.name for found in clusters.list_clusters()] == ["big/one-two", "default"]
    with pytest.raises(GroupError, match="^-c one-two: .*answer"):
        clusters.find_connection_file("one-two")
    with pytest.raises(GroupError, match="^-c three: .*no such.*ipcluster start"):
        clusters.find_connection_file("three")


def test_either_file_of_a_cluster_identifies_the_cluster(profiles: Path) -> None:
    folder = profiles / "profile_big" / "security"
    file = str(folder / "ipcontroller-one-two-client.json")
    assert (
        clusters.find_connection_file(file)
        == clusters.find_connection_file(str(folder / "cluster-one-two.json"))
        == file
    )
    with pytest.raises(GroupError, match="no file .*none.json"):
        clusters.find_connection_file(str(folder / "none.json"))
    (folder / "other.json").write_text("[]")
    with pytest.raises(GroupError, match="-client.json"):
        clusters.find_connection_file(str(folder / "other.json"))


@pytest.mark.parametrize(("n", "counts"), [(None, [2, 1]), (3, [2, 1]), (2, [2]), (1, [1])])
def test_ranks_are_on_the_first_hosts(n: int | None, counts: list[int]) -> None:
    attachment = Attachment("file", SEATS, n)
    attachment.ensure_enough()
    assert [count for _, count in attachment.counts()] == counts


def test_more_ranks_than_engines_are_refused() -> None:
    with pytest.raises(GroupError, match="^-n 4: .*3 engines"):
        Attachment("file", SEATS, 4).ensure_enough()


def test_an_unknown_launcher_is_refused_and_known_launchers_are_listed() -> None:
    launcher_engines.check_launcher("ssh")
    with pytest.raises(BadInput, match="^--engines shh: .*slurm.*ssh"):
        launcher_engines.check_launcher("shh")


def test_a_link_carries_long_streams_and_reports_missing_messages() -> None:
    out, into = os.pipe()
    source, feed = os.pipe()
    near = Link(lambda content, data: far.heard(content, data) and None, {})
    far = Link(lambda content, data: near.heard(content, data) and None, {"in": into})
    whole = os.urandom(60_000)
    for number in range(3 * far_end.WINDOW):
        os.write(feed, whole[:1000])
        if number == 0:
            threading.Thread(target=near.read, args=("in", source), daemon=True).start()
    os.close(feed)
    got = b""
    while data := os.read(out, 1 << 16):
        got += data
    assert got == whole[:1000] * 3 * far_end.WINDOW
    assert far.drain(5)
    far.heard({"number": 10**6, "what": "beat", "value": None}, b"")
    assert far.fault == "a message was lost on its way"
    os.close(out)
    os.close(source)


def test_links_on_engines_import_only_the_standard_library() -> None:
    assert far_end.__file__ is not None
    text = Path(far_end.__file__).read_text()
    modules = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert modules <= sys.stdlib_module_names


def test_the_manifest_of_the_page_is_a_jobset() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = [block.partition("```")[0] for block in PAGE.read_text().split("```yaml\n")[1:]]
    manifest: dict[str, Any] = yaml.safe_load(text)
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    jobs = {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}
    assert set(jobs) == {"controller", "engines"}
    for name, spec in jobs.items():
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["command"][0] == {"controller": "ipcontroller", "engines": "ipengine"}[name]
        assert "--cluster-id=ipp" in container["command"]
    assert f"--location={manifest['metadata']['name']}-controller-0-0.{manifest['metadata']['name']}" in str(jobs)
