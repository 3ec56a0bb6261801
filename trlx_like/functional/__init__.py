"""The mathematics of the algorithms: functions of tensors and floats, without models, configuration or devices.

Losses and estimators are element-wise; the caller masks, sums and divides. Zeroing a loss at padding is not enough if
the padded inputs may hold inf or NaN: the gradient of a masked entry would be 0 * inf = NaN. Clear the inputs with
`masked.zero_padding` first, or leave padding out of the computation, and sum the loss with `masked.masked_sum`.
"""
