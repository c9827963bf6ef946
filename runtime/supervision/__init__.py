"""Who runs, who died first, who hangs: a keeper per process, and a supervisor where the job was started."""
