/* ScaLAPACK's factorisations of an n x n matrix of float64, timed: a peer of ours.
 *
 *     mpiexec -n 2 ./scalapack cholesky|lu_factor|qr N BLOCK GRID_ROWS GRID_COLUMNS CALLS
 *
 * Rank 0 prints the seconds of each call except a first one, which touches all pages. QR is pdgeqrf and
 * pdorgqr, so that Q is formed, as ours is.
 */

#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void Cblacs_get(int context, int what, int *value);
void Cblacs_gridinit(int *context, const char *order, int rows, int columns);
void Cblacs_gridinfo(int context, int *rows, int *columns, int *row, int *column);
int numroc_(const int *n, const int *block, const int *process, const int *first, const int *count);
void descinit_(int *desc, const int *m, const int *n, const int *mb, const int *nb, const int *row,
               const int *column, const int *context, const int *leading, int *info);
void pdpotrf_(const char *uplo, const int *n, double *a, const int *ia, const int *ja,
              const int *desc, int *info);
void pdgetrf_(const int *m, const int *n, double *a, const int *ia, const int *ja, const int *desc,
              int *pivots, int *info);
void pdgeqrf_(const int *m, const int *n, double *a, const int *ia, const int *ja, const int *desc,
              double *tau, double *work, const int *lwork, int *info);
void pdorgqr_(const int *m, const int *n, const int *k, double *a, const int *ia, const int *ja,
              const int *desc, const double *tau, double *work, const int *lwork, int *info);

static const int zero = 0, one = 1;

/* A number in [-1, 1) for each element, the same on all ranks. */
static double noise(int64_t i, int64_t j) {
    uint64_t x = (uint64_t)i * 0x9E3779B97F4A7C15u ^ ((uint64_t)j + 1) * 0xC2B2AE3D27D4EB4Fu;
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 29) * 0x94D049BB133111EBu;
    return (double)((int64_t)(x ^ x >> 32) >> 11) * 0x1p-52;
}

static int64_t global(int local, int block, int process, int count) {
    return ((int64_t)(local / block) * count + process) * block + local % block;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 7) return 2;
    const char *what = argv[1];
    int n = atoi(argv[2]), block = atoi(argv[3]), calls = atoi(argv[6]), context, p, q, row, column;
    Cblacs_get(-1, 0, &context);
    Cblacs_gridinit(&context, "Row", atoi(argv[4]), atoi(argv[5]));
    Cblacs_gridinfo(context, &p, &q, &row, &column);
    int rows = numroc_(&n, &block, &row, &zero, &p), desc[9], info;
    int columns = numroc_(&n, &block, &column, &zero, &q), leading = rows > 1 ? rows : 1;
    descinit_(desc, &n, &n, &block, &block, &zero, &zero, &context, &leading, &info);
    double *a = malloc(sizeof(double) * leading * (columns + 1)), *tau = malloc(8L * (n + block));
    int *pivots = malloc(sizeof(int) * (n + 2 * block)), positive = !strcmp(what, "cholesky");
    int queries = -1, lwork = 0;
    double need[2] = {0, 0}, *work = NULL;
    if (!strcmp(what, "qr")) {
        pdgeqrf_(&n, &n, a, &one, &one, desc, tau, &need[0], &queries, &info);
        pdorgqr_(&n, &n, &n, a, &one, &one, desc, tau, &need[1], &queries, &info);
        lwork = (int)fmax(need[0], need[1]);
        work = malloc(sizeof(double) * lwork);
    }
    for (int call = 0; call <= calls; call++) {
        for (int j = 0; j < columns; j++)
            for (int i = 0; i < rows; i++) {
                int64_t r = global(i, block, row, p), c = global(j, block, column, q);
                int swaps = positive && r < c;
                a[(int64_t)j * leading + i] =
                    noise(swaps ? c : r, swaps ? r : c) + (positive && r == c ? 2 * sqrt(n) : 0);
            }
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        if (positive) {
            pdpotrf_("L", &n, a, &one, &one, desc, &info);
        } else if (!strcmp(what, "lu_factor")) {
            pdgetrf_(&n, &n, a, &one, &one, desc, pivots, &info);
        } else {
            pdgeqrf_(&n, &n, a, &one, &one, desc, tau, work, &lwork, &info);
            pdorgqr_(&n, &n, &n, a, &one, &one, desc, tau, work, &lwork, &info);
        }
        MPI_Barrier(MPI_COMM_WORLD);
        if (info) {
            fprintf(stderr, "info %d\n", info);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        if (call && !row && !column) printf("%.6f\n", MPI_Wtime() - start);
    }
    MPI_Finalize();
    return 0;
}
