"""The doors' `matmul` and `Matmul`: one call, or one plan for many executions."""
