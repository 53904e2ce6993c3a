"""Linear algebra on distributed arrays and on parts: products in `advanced`, factorisations, norms.

Names are NumPy's and SciPy's. `advanced`, `ComputeType`, its MatmulComputeType, and `DirectSolver`
are those of nvmath.distributed.linalg.
"""

from numpy.linalg import LinAlgError

from shardmath.distributed import decompositions, low_rank, norms
from shardmath.distributed.given_parts import of_parts_too
from shardmath.distributed.refinement import RefinedSolution, solve
from shardmath.errors import InvalidDirectSolverState
from shardmath.factorisations.api import (
    cholesky,
    det,
    inv,
    lu_factor,
    lu_solve,
    slogdet,
    solve_triangular,
)
from shardmath.factorisations.direct_solver import DirectSolver, DirectSolverOptions, direct_solver
from shardmath.factorisations.operands import SingularMatrix
from shardmath.factorisations.problem import FactorisationOptions
from shardmath.linalg import advanced
from shardmath.operators.matmul.options import MatmulComputeType as ComputeType

cond = of_parts_too(norms.cond)
eigh = of_parts_too(decompositions.eigh, results=2)
eigvalsh = of_parts_too(decompositions.eigvalsh)
lstsq = of_parts_too(decompositions.lstsq, ("a", "b"), results=4)
matrix_rank = of_parts_too(norms.matrix_rank)
norm = of_parts_too(norms.norm)
pinv = of_parts_too(norms.pinv)
qr = of_parts_too(decompositions.qr, results=2)
svd = of_parts_too(decompositions.svd, results=3)
svd_lowrank = of_parts_too(low_rank.svd_lowrank, results=3)
svdvals = of_parts_too(decompositions.svdvals)

__all__ = [
    "ComputeType",
    "DirectSolver",
    "DirectSolverOptions",
    "FactorisationOptions",
    "InvalidDirectSolverState",
    "LinAlgError",
    "RefinedSolution",
    "SingularMatrix",
    "advanced",
    "cholesky",
    "cond",
    "det",
    "direct_solver",
    "eigh",
    "eigvalsh",
    "inv",
    "lstsq",
    "lu_factor",
    "lu_solve",
    "matrix_rank",
    "norm",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "svd_lowrank",
    "svdvals",
]


def __dir__() -> list[str]:
    return sorted(__all__)
