"""The plain eager definition: config, numerics, ops, modules, caches, checkpoints."""
