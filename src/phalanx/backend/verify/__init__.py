"""Whether operations gave what they should have.

Start with `bounds`: which results of a reduction are right, given the inputs of all ranks.
"""
