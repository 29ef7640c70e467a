"""The lock format: what is written is read back, and what does not belong is reported rather than dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from arch_config.table import base_requirements, load_table
from deps.locks import Entry, parse_lock, render_lock, version_in_url
from deps.policy import read_files

PLATFORM = load_table().platforms["cpu"]

names = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,8})?", fullmatch=True)
versions = st.from_regex(r"[0-9]{1,3}\.[0-9]{1,3}(\.post[0-9])?", fullmatch=True)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    found = {}
    for name in draw(st.sets(names, max_size=8)):
        version = draw(versions)
        file_name = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        url = draw(st.sampled_from([None, f"https://wheels.example.org/{file_name}"]))
        found[name] = Entry(name, draw(st.sampled_from([(), ("extra",), ("a", "b")])), version, url, draw(hashes), file_name)
    return list(found.values())


@given(entries())
def test_what_is_written_is_read_back(written: list[Entry]) -> None:
    """Entries, digests and the list of what is unverified survive the round trip, without a fault."""
    lock = parse_lock(render_lock(PLATFORM, base_requirements(), written))
    assert sorted(lock.entries, key=lambda e: e.name) == sorted(written, key=lambda e: e.name)
    assert lock.body_digest == lock.actual_body_digest
    assert lock.faults == ()
    assert list(lock.unverified) == PLATFORM.unverified()


def test_real_locks_are_rendered_the_same() -> None:
    """A lock read and written again is the same text: nothing of it is lost in reading."""
    files = read_files()
    for name, text in files.locks.items():
        assert render_lock(files.table.platforms[name], files.base, files.lock(name).entries) == text


def test_lines_that_do_not_belong_are_faults() -> None:
    """Options, markers, missing versions: each is a fault of its own, and the rest is still read."""
    text = render_lock(PLATFORM, base_requirements(), [Entry("click", (), "8.5.1", None, "0" * 64, "click-8.5.1-py3-none-any.whl")])
    lock = parse_lock(text + "--index-url https://wheels.example.org\nrich ; python_version > '3'\nrich\n")
    assert [entry.name for entry in lock.entries if entry.name == "click"] == ["click"]
    assert any("option lines" in fault for fault in lock.faults)
    assert sum("expected name==version" in fault for fault in lock.faults) == 2


def test_version_in_url() -> None:
    """The version stands in the file name, with its local label unquoted; a URL of no wheel has none."""
    assert version_in_url("https://h.org/cpu/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl") == "2.13.0+cpu"
    assert version_in_url("https://h.org/archive.zip") == ""
