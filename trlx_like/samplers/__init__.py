"""Samplers: engines that generate token ids or images, and the code that turns their output into experience and text."""
