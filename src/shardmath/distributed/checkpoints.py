"""Checkpoints: a folder with a file of NumPy's format for each array, and one that names them.

    ocean/checkpoint.json      {"arrays": {"u": {"file": "u-3f2a90bb.npy", "dtype": "float64"}},
    ocean/u-3f2a90bb.npy        "values": {"step": 120}}

The folder contains what `checkpoint.json` names. A checkpoint that replaces another writes its
arrays under new names, renames that one file into place, and then removes the old arrays: at every
moment one of the two is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardmath.context.context import DistributedContext
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.npy import Stored, read_stored, save_array
from shardmath.distributed.shared_file import SAVE, agreed_token, appearing, on_rank_0

_MANIFEST = "checkpoint.json"


def save_arrays(
    context: DistributedContext,
    folder: Path,
    arrays: Mapping[str, tuple[DistributedArray, bool]],
    values: Mapping[str, Any],
) -> None:
    """Save arrays, each with whether it is written in Fortran order, and values, which are the same
    on all ranks. Collective.
    """
    token = agreed_token(context)
    files = {name: f"{quote(name, safe='')}-{token}.npy" for name in arrays}
    entries = {
        name: {"file": files[name], "dtype": x.element_type.name} for name, (x, _) in arrays.items()
    }
    text = json.dumps({"arrays": entries, "values": dict(values)}, indent=1) + "\n"
    before, is_new = context.on_all_ranks(SAVE, lambda: (_files(folder), not folder.exists()))
    try:
        on_rank_0(context, lambda: folder.mkdir(exist_ok=True))
        manifest = folder / _MANIFEST
        with appearing(context, manifest, lambda file: _write(file, text)):
            for name, (x, fortran) in arrays.items():
                save_array(x, folder / files[name], fortran=fortran)
    except BaseException:
        # This call's manifest is gone, unless it was renamed into place already, where it stays.
        if not set(files.values()) & _files(folder):
            _remove(folder, set(files.values()))
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
        raise
    on_rank_0(context, lambda: _remove(folder, before))


def stored_arrays(folder: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The arrays and the values of a checkpoint. Local.

    Raises OSError and ValueError as `read_stored`, and ValueError for a folder that is no
    checkpoint.
    """
    manifest = _manifest(folder)
    stored = {
        name: read_stored(folder / entry["file"], entry["dtype"])
        for name, entry in manifest["arrays"].items()
    }
    return stored, manifest["values"]


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / _MANIFEST).read_text()
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no {_MANIFEST}") from None
    try:
        manifest: dict[str, Any] = json.loads(text)
        files = [entry["file"] for entry in manifest["arrays"].values()]
        if any(Path(file).name != file for file in files):
            raise ValueError("it names files elsewhere")
        manifest["values"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / _MANIFEST} names no arrays: {error}") from None
    return manifest


def _files(folder: Path) -> set[str]:
    """The files of the arrays of the checkpoint in a folder; none where there is no checkpoint."""
    try:
        return {entry["file"] for entry in _manifest(folder)["arrays"].values()}
    except (OSError, ValueError):
        return set()


def _remove(folder: Path, files: set[str]) -> None:
    for file in files:
        with suppress(OSError):
            (folder / file).unlink()


def _write(file: Path, text: str) -> None:
    with file.open("x") as made:
        made.write(text)
