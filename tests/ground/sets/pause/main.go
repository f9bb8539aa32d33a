// Pause keeps a pod's namespaces open: it reaps orphans and ends when it is told to.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	events := make(chan os.Signal, 16)
	signal.Notify(events, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for event := range events {
		if event != syscall.SIGCHLD {
			return
		}
		reap()
	}
}

// reap collects every ended child; one SIGCHLD may stand for several of them.
func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if pid <= 0 {
			return
		}
	}
}
