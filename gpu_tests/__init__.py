"""Real generation: what the trainer replays is what the engine did, and packing changes nothing. See README.md."""
