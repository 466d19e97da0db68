"""Train and look, from Python; run it from the repository's root. Arguments are overrides."""

import sys

import courtside

recipe = courtside.load_recipe("shared-rule", sys.argv[1:])
run = courtside.train(recipe, "runs/ten-lines")
for e in run.evaluations():
    print(f"{e.policy} {e.step}: {e.mean_score:.1%} [{e.ci_low:.1%}, {e.ci_high:.1%}]")
first = run.trajectories(step=0)[0]
gaps = [t - s for t, s in zip(first.teacher_logp, first.student_logp, strict=True)]
print(f"The teacher disliked token {gaps.index(min(gaps))} most in: {first.trajectory.response}")
print(f"Report: {run.path / 'report.html'}")
