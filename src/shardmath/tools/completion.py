"""Lines for a shell's start-up file that make it complete the arguments of `shardmath`."""

from __future__ import annotations

import argparse

from shardmath.tools.bench import names as benchmarks

SHELLS = ("bash", "zsh", "fish")
_FILES = {"FILE", "FOLDER", "script.py"}  # arguments that are completed by what there is


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for `shell`, one of SHELLS: it completes commands, and then their options, the
    names of benchmarks and, where a command takes files, those.
    """
    [commands] = [each for each in parser._actions if isinstance(each.choices, dict)]
    assert isinstance(commands.choices, dict), "commands have parsers"
    words = {name: _words(each) for name, each in commands.choices.items()}
    words["bench"] += benchmarks()
    options = {name: " ".join(each) for name, each in words.items()}
    with_files = {
        name
        for name, each in commands.choices.items()
        if not _FILES.isdisjoint(action.metavar for action in each._actions)
    }
    names = " ".join(options)
    if shell == "fish":
        lines = [f"complete -c shardmath -n __fish_use_subcommand -f -a '{names}'"]
        for name, completed in options.items():
            files = "" if name in with_files else " -f"  # keeps files out
            only = f"complete -c shardmath -n '__fish_seen_subcommand_from {name}'"
            lines += [f"{only}{files} -a '{completed}'"]
        return "\n".join(lines)
    cases = "\n".join(
        f"    {name}) COMPREPLY=($(compgen{' -f' if name in with_files else ''} "
        f'-W "{completed}" -- "$2")) ;;'
        for name, completed in options.items()
    )
    start = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{start}_shardmath() {{
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{names}" -- "$2")); return; fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
}}
complete -F _shardmath shardmath"""


def _words(parser: argparse.ArgumentParser) -> list[str]:
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings if action.option_strings else list(action.choices or ())
    return words
