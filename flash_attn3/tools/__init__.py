"""Tools that say how a call would run and what prevents it: can_use, explain, doctor."""
