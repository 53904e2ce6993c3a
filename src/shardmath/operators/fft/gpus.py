"""Transforms on the ranks' GPUs: what performs their programs there, in stages or in chunks.

Which buffers peers reach depends on where all ranks' results lie. Transforms of a context have one
lane, and follow each other on any streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.cuda.driver import beside_captures
from shardmath.operators.fft import rank_plan
from shardmath.operators.fft.preparation import prepare
from shardmath.operators.fft.push_stream import PushStream
from shardmath.operators.fft.rank_plan import DevicePlan, Results
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.workspace import give_back
from shardmath.program import gpu_performing
from shardmath.program.gpu_performing import Execution, ExposedArrays, Facts, GPUPerformer, Ready
from shardmath.program.performing import Plan
from shardmath.program.steps import Fused

__all__ = ["GPUTransforms"]

_DECISIONS = {Results(False, False): 1, Results(True, False): 2, Results(True, True): 3}


class GPUTransforms(GPUPerformer):
    """Performs programs of transforms on GPUs. Workspace is the lane's, not an object's."""

    @property
    def replays(self) -> bool:
        """See GPUPerformer."""
        return rank_plan.USE_GRAPHS

    @property
    def _lane(self) -> Lane:
        return Lane.numbered(self._context, LANES - 1)

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        wanted = ("b", plan.program.results["out"].order)  # both, where the array has no other
        reachable = all(each.result for each in facts)
        packed = all(each.packed and each.order in wanted for each in facts)
        return _DECISIONS[Results(reachable, reachable and packed)]

    def _ready(self, execution: Execution, decision: int, *, allocate: bool) -> Ready | None:
        (step,) = execution.plan.program.steps
        assert isinstance(step, Fused), "as the operation makes it"
        plan: DevicePlan = step.plan
        results = next(each for each, number in _DECISIONS.items() if number == decision)
        _, stream, operand, result = execution
        context, lane = self._context, self._lane
        with beside_captures():  # memory and plans are no part of what is captured
            prepared = prepare(context, lane, stream, plan, operand, result, results)
            places = prepared.exposed()
        launch = prepared.launch

        def bind(all_places: Sequence[ExposedArrays]) -> gpu_performing.Launch:
            exposed = [[each for each in places if each is not None] for places in all_places]
            lane.team.device.activate()

            def run(stream: int) -> None:
                launch.run(stream, exposed)

            return run

        pushes = launch.plan.tables is not None
        return Ready(places, bind, PushStream.of(context).require_usable if pushes else None)

    def release(self) -> None:
        """Give back the workspace, which is that of all operations of the context. Local."""
        give_back(self._context)
