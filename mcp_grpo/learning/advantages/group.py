"""
`advantage_mode="group"`: TRL's own.

    A_i = (R_i - mean_j R_j) / s

for the total reward `R_i` of attempt `i` at a task, over all attempts `j` of its group; `s` is what `scale_rewards` says. Every
token of a trajectory has the same advantage. TRL computes it; nothing is added here.
"""
