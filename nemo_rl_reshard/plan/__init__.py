"""From two declarations to one whole-model plan, pure and deterministic; numpy allowed, torch not."""
