"""Teams without a GPU, which only take notes. Operations make the device's context the calling
thread's before they launch, which fails in a thread that has none; a team with other pads reaches
the same ranks.
"""

from types import SimpleNamespace

import pytest

from shardmath.symmetric.team import FarTeam, Team

NEAR, FAR = 0, 1  # ranks
OPERATIONS = {
    "barrier": lambda team, peer: team.barrier(7),
    "raise_flag": lambda team, peer: team.flag("raise_flag", peer, 7, slot=64, channel=0),
    "lower_flag": lambda team, peer: team.flag("lower_flag", peer, 7, slot=64, channel=0),
}


def noted(kind):
    """A team of two ranks, and the notes that its device and its launches take."""
    team, notes = object.__new__(kind), []
    team.rank, team.size, team.channels, team.pads = 0, 2, 4, (4096, 8192)
    team.device = SimpleNamespace(name="cuda:0", activate=lambda: notes.append("activated"))
    team.check = lambda: None
    team._launch = lambda function, *args, **named: notes.append(function)
    if kind is FarTeam:
        pad = SimpleNamespace(segment=0, offset=0)
        quiet, put = (lambda *args: None for _ in range(2))
        team.locate(SimpleNamespace(quiet=quiet, put=put), (0, 1), {FAR: pad})
    return team, notes


@pytest.mark.parametrize("peer", [NEAR, FAR])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", [Team, FarTeam])
def test_the_context_is_there_before_a_launch(kind, operation, peer):
    team, notes = noted(kind)
    OPERATIONS[operation](team, peer)
    assert notes[0] == "activated"
    assert len(notes) > 1


@pytest.mark.parametrize("kind", [Team, FarTeam])
def test_a_team_with_other_pads_reaches_the_same_ranks(kind, monkeypatch):
    team, _ = noted(kind)
    team._board = team._departures = team.shares_device = None
    initialise = lambda new, device, board, own, pads, **_: setattr(new, "pads", pads)  # noqa: E731
    monkeypatch.setattr(Team, "__init__", initialise)
    place = SimpleNamespace(segment=1, offset=64)
    other = team.with_pads(None, (4160, 0), {FAR: place}, 1)
    assert type(other) is kind and other.pads == (4160, 0)
    if kind is FarTeam:
        assert (other.transport, other.numbers) == (team.transport, team.numbers)
        assert other._far == {FAR: place}
