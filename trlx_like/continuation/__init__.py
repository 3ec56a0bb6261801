"""Text from a trained model on the command line: `trlx-like generate` and `trlx-like chat`."""
