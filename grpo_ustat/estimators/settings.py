r"""How questions enter a batch, and the error that follows (paper, Proposition 3, beyond unbiased).

A batch estimate is `T = 1/B sum_b ghat_{x_b}`, ghat_x an estimate from one group of question x, all
independent given the questions. With e_x = E||ghat_x||^2, p_x = ||E ghat_x||^2 and, over m
questions, mu = mean_x E ghat_x and a target tau,

    bias^2 = ||mu||^2 - 2 <mu, tau> + ||tau||^2
    all_questions_once    variance = mean(e - p) / m
    with_replacement      variance = ( mean e - ||mu||^2 ) / B
    without_replacement   variance = { mean(e - p) + (m-B)/(m-1) ( mean p - ||mu||^2 ) } / B
    one_question          variance = mean(e - p), bias^2 the mean of each question's own
"""

from __future__ import annotations

import numpy as np


def decompose(
    setting: str, num_prompts: int, questions: int, e, p, mu_sq, cross, target_sq
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean squared error, bias^2 and variance, elementwise.

    Args:
        setting: see the module; for one_question pass means over questions as the last three.
        num_prompts: B of the two middle settings.
        questions: m.
        e, p: means over questions.
        mu_sq, cross, target_sq: ||mu||^2, <mu, tau>, ||tau||^2.
    """
    bias2 = mu_sq - 2 * cross + target_sq
    variance = e - p
    if setting == "all_questions_once":
        variance = variance / questions
    elif setting == "with_replacement":
        variance = (e - mu_sq) / num_prompts
    elif setting == "without_replacement":
        between = (questions - num_prompts) / max(1, questions - 1) * (p - mu_sq)
        variance = (variance + between) / num_prompts
    return bias2 + variance, bias2, variance
