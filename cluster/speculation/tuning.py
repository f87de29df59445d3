"""The constants that decide a depth, in addition to the settings of `cluster.config.speculation`.

`tests/cluster/speculation/test_tuning.py` limits their number: what can be measured needs no constant.
"""

# Measurements.
WINDOW = 128  # tests, rounds or steps that an average remembers: it then knows a rate within 0.03
RATE = 0.125  # learning rate of times, per observation: step times scatter by 7 %, and slower machines show in seconds
GAIN_RATE = 1 / 64  # learning rate of the realised gain, per step: tokens per step scatter by 50 %, this average by 4 %
CLIP = 3.0  # a step or reply counts as at most this many times the expected time: page faults delay some
KIND_WIDTH = 0.25  # temperature: sequences share their acceptance if their temperatures round to the same multiple
# Share of the tokens that are lost if a step does not wait for them: the next step uses late drafts that still fit. A
# 1B draft in INT4 for 8 streams on an A10G reached 951 tokens/s with this share, and 899 with a share of 1.
LOST_SHARE = 0.5

# Assumptions before the first measurement.
INITIAL_RATE = 0.7  # acceptance of a draft: that of the bundled pair
PRIOR = 8.0  # weight of assumptions, in tests, rounds or steps: as many measurements count as much

# Steps before the first request.
TRIAL_DEPTHS = (0, 1, 3, 7, 15)  # draft tokens: three depths tell the first draft's time from that of later ones
TRIAL_REPEATS = 3  # steps of each size: the first may compile
TRIAL_SECONDS = 1.5  # time after which no larger step is tried: requests wait meanwhile

# Plans.
PLAN_STEPS = 16  # steps between two plans: a plan takes as long as the bookkeeping of some steps
LOAD_CHANGE = 2  # a plan ends early if the number of sequences is multiplied or divided by more than this
LEAST_GAIN = 1.02  # minimum predicted gain, of drafts on a device and of trees over chains: times err by about 2 %
TRIAL_COST = 0.005  # maximum share of the tokens that drafts may cost while they only measure

# Limits.
LIMIT_TOKENS = 32  # minimum tokens of an answer to which a limit applies: the mean of fewer is mostly chance
MAX_CLASSES = 2  # limits that a step distinguishes: each one takes as long to plan for as a few steps without

KEEP = 1.0 - 1.0 / WINDOW  # decay of a count, per observation
RECENT = round(1.0 / RATE)  # observations that most of an average with `RATE` consists of


def has_load_changed(num_sequences: int, num_planned: int) -> bool:
    """Returns True if a plan for `num_planned` sequences does not fit `num_sequences`."""
    return not num_sequences <= LOAD_CHANGE * num_planned <= LOAD_CHANGE**2 * num_sequences
