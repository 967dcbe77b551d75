// Exchanges without a barrier: ids are written to the ranks that own their rows, and rows to the ranks that asked.

#include "apart.cuh"
#include "flags.cuh"

KERNEL(push_lines_plain, (push_lines<false, true>))
KERNEL(push_lines_apart, push_lines_apart_plain)
KERNEL(push_lines_unmarked, (push_lines<false, false>))
KERNEL(push_lines_marked, (push_lines<true, false>))
KERNEL(push_flags_plain, push_flags<true>)
KERNEL(push_flags_any, push_flags<false>)
