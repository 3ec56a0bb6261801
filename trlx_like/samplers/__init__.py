"""Samplers: they generate text or images, and return what training and reward functions need of it."""
