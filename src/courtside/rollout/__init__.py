"""Trajectories of a step: sampled by the student, or off-policy from data or a teacher."""
