"""Stand-ins for what a machine without a GPU lacks. Compiling is always real."""
