"""The measurements of the GPU suite. Each takes a scale and yields rows (what, value, unit, remark).

A share compares with a measurement on the same card. For a decode step, the bytes that must move are compared with
a copy (read and write counted). For a scoring pass, operations are compared with a large matrix product.
"""
