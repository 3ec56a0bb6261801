"""Samplers: they generate text or images, and return them in the forms that training and reward functions need."""
