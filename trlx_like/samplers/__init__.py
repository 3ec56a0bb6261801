"""Samplers: engines that generate, and what turns their token ids into experience and text."""
