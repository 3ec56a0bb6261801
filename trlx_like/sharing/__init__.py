"""Hands a trained model on: the export of a run with its model card, and the upload to the Hugging Face Hub."""
