"""Matrix multiplication of operands that are split across ranks."""
