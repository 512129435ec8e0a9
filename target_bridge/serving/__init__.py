"""Stock SGLang as a server in a process of its own: started, asked, diagnosed when it fails, always stopped.

`engine_process`  what runs there: stock `sglang.Engine` behind two pipes; imports nothing of ours
`server`          our side: `EngineServer`, deadlines, the process group
`known_faults`    what SGLang itself does wrong with a draft, by version
`diagnosis`       the end of a server's log -> what it means and what to do
"""
