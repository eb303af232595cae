"""Padded lengths: as little padding, and as few lengths, as promised."""

from keras_sparsity.machines.capacities import CAPACITIES, capacity


def test_at_most_an_eighth_is_padding():
    for length in [*range(8, 3000), 10**6, 10**6 + 1, 2**40 + 1]:
        assert length <= capacity(length) <= length * 9 / 8


def test_eight_to_an_octave():
    for octave in range(3, 30):
        within = (CAPACITIES >= 2**octave) & (CAPACITIES < 2 ** (octave + 1))
        assert within.sum() == 8


def test_the_next_in_the_table():
    for length in [*range(3000), 10**6 + 1, 2**40 + 1]:
        assert capacity(length) == min(CAPACITIES[CAPACITIES >= length])
