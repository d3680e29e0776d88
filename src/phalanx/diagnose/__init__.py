"""What ranks are doing, and what they were doing when they ended: from boards, black boxes, stacks and ``/proc``."""
