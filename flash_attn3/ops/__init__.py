"""The ops: schemas, CPU implementations, fakes, autograd, and the rules of their arguments."""
