"""Kernels that ship with the tuner."""
