"""Whose files are taken from the folder of compiled kernels. Needs neither GPU nor compiler."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmath.cuda import compile as compiling
from shardmath.cuda import kernel_cache

OTHER = 65534  # a user
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, list[str]]:
    """What a kernel is compiled to, or was, and what is warned of in two calls."""
    monkeypatch.setenv("SHARDMATH_CACHE", str(folder))
    monkeypatch.setattr(compiling, "_compiler_version", lambda: "none")
    monkeypatch.setattr(compiling, "_compile", lambda *_: b"compiled here")
    kernel_cache._warn.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = {compiling.compiled("signals", (), "sm_90") for _ in range(2)}
    assert len(found) == 1
    return found.pop(), [str(each.message) for each in seen]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a kernel in a folder `cache`; it holds something else."""
    folder = tmp_path / "cache"
    fetched(folder, monkeypatch)
    (entry,) = folder.iterdir()
    entry.write_bytes(b"planted")
    return entry


def test_an_own_file_in_an_own_folder_is_taken(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetched(planted.parent, monkeypatch) == (b"planted", [])
    assert planted.parent.stat().st_mode & 0o777 == 0o700
    assert planted.stat().st_mode & 0o777 == 0o600


def open_to_all(entry: Path) -> None:
    entry.parent.chmod(0o777)


def open_to_the_group(entry: Path) -> None:
    entry.parent.chmod(0o770)


def sticky(entry: Path) -> None:
    entry.parent.chmod(0o1777)


def linked(entry: Path) -> None:
    entry.parent.rename(entry.parent.with_name("elsewhere"))
    entry.parent.symlink_to("elsewhere")


def given_away(entry: Path) -> None:
    os.chown(entry.parent, OTHER, -1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (open_to_all, "can be written by other users; chmod go-w"),
        (open_to_the_group, "can be written by other users; chmod go-w"),
        (sticky, "can be written by other users; chmod go-w"),
        (linked, "is a symbolic link; name the folder that it leads to"),
        pytest.param(
            given_away, f"belongs to user {OTHER}; name a folder of your own", marks=AS_ROOT
        ),
    ],
)
def test_an_unsafe_folder_is_neither_read_nor_written_and_warned_of_once(
    planted: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(planted)
    code, (warning,) = fetched(planted.parent, monkeypatch)
    assert code == b"compiled here"
    assert planted.read_bytes() == b"planted"
    assert f"{planted.parent} {words}" in warning
    assert "SHARDMATH_CACHE names the folder" in warning


def writable(entry: Path) -> None:
    entry.chmod(0o664)


def link(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to("elsewhere")


def pipe(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry)


def anothers(entry: Path) -> None:
    os.chown(entry, OTHER, -1)


@pytest.mark.parametrize("spoil", [writable, link, pipe, pytest.param(anothers, marks=AS_ROOT)])
def test_a_file_that_others_may_have_written_is_made_anew(
    planted: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    spoil(planted)
    assert fetched(planted.parent, monkeypatch) == (b"compiled here", [])
    assert not planted.is_symlink()
    assert planted.read_bytes() == b"compiled here"
    assert planted.stat().st_uid == os.geteuid()
    assert not list(planted.parent.glob(".making-*"))


def test_what_cannot_be_a_folder_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (Path(os.devnull), Path("/proc/no/such"), tmp_path / "file"):
        (tmp_path / "file").touch()
        assert fetched(where, monkeypatch) == (b"compiled here", [])
