"""What says how a call would run, and what stands in its way: can_use, explain, doctor."""
