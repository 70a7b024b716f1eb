"""Routes stock `triton.autotune` kernels into smart_autotune; one module for each verified version."""
