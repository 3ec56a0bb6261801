"""The mathematics: tensors and floats in, tensors out, knowing no model, configuration, tokenizer or device.

Losses and estimators are element-wise; the caller masks, sums and divides. Torch multiplies upstream
gradients by local derivatives, and 0 * inf is NaN, so a caller whose padding may hold anything clears the
*inputs* of a formula with `masked.zero_padding` (or never computes padding at all), and sums its output with
`masked.masked_sum`.
"""
