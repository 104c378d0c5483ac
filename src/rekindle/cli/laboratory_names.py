"""Names of the laboratory as plain data, so that a shell's completion need not import it (that takes seconds).

They come from `rekindle.lab.catalog`; a test compares the two and renews this file on request:
REKINDLE_RENEW=1 python -m pytest tests/cli/test_first_hour.py -k laboratory_names
"""

# One name per line would be a hundred lines.
# ruff: noqa: SIM905

SETTINGS = """
digits random-labels permuted-inputs label-shift drift warm-start continual class-incremental alphabet domains
latents codes experts ranks random-labels+replay permuted-inputs+replay drift+replay alphabet+replay
domains+replay random-labels+state alphabet+state domains+state sac-pendulum sac-pendulum-quick ppo-cartpole
ppo-cartpole-quick dqn-cartpole dqn-cartpole-quick ppo-offsets-cartpole ppo-offsets-acrobot
ppo-offsets-lunarlander dqn-games dqn-midpoint-breakout dqn-midpoint-asterix dqn-atari-asterix
dqn-replay-ratio ppo-gravity ppo-slippery-ant sac-midpoint-hopper sac-midpoint-walker
paper/warm-start-resnet18 paper/warm-start-vit paper/warm-start-vgg16 paper/continual-resnet18
paper/continual-vit paper/continual-vgg16 paper/class-incremental-vit paper/class-incremental-vgg16 paper/gpt
paper/dqn-atari-asterix paper/dqn-atari-demonattack paper/sac-humanoid
""".split()
ARMS = """
nothing full-reset he-reset orthogonal-reset shrink-perturb shrink-perturb-fresh dash redo regrama
continual-backprop self-normalized-reset l2-init parseval spectral isometry-loss adamo weight-decay
weight-clip normalize-project hyperball soft-rescaling weight-reset upgd hare-tortoise injection
layer-norm-reset muon fire fire-paper-cnn shrink-reset rate-raised rate-rewarm optimizer-reset rescale shrink
fire-shrink random-isometry-shrink full-reset-shrink dash-shrink effective-lr fire-effective-lr start-norm
random-isometry gaussian random-isometry-nearest fresh-at-norm head-reset fire-10 fire-5 fire-paper
fire-nearest fire-norm fire-init fire-qk fire-attention fire-mlp fire-all fire-state-fresh fire-state-moments
fire-state-step fire-state-none fire-body
""".split()
GROUPS = """
main controls norms solvers scales targets states continuous all
""".split()
DATA = """
digits fashion-mnist mnist cifar-10 cifar-100 tiny-imagenet shakespeare bible
""".split()
