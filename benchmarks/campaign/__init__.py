"""A campaign of damage: copies of networks and runs are damaged, killed or raced for, then used.

    cd benchmarks && python -m campaign --minutes 10

Whatever was done to a folder, the outcome is the same bits as without damage or an error of one
sentence: never other content in silence, a traceback, a hang or a want of memory.
"""
