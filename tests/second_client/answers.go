package main

// What a device says of its result, and what it is answered: sections 9, 10 and 13.

import (
	"math/rand"
	"os"
	"strings"
	"time"
)

func (c *client) onAck(m object, r *result) {
	c.say(object{"event": "ack", "status": m["status"], "what": r.Answer.What, "run": r.Run, "round": r.Round, "exchange": r.Exchange, "detail": text(m, "detail", "")})
	retry, _ := m["retry_ms"].(int64)
	switch status := m["status"]; {
	case status == "retry":
		c.announce = time.Now().Add(time.Duration(retry) * time.Millisecond)
	case status == "bad_hash" && !r.Resent:
		r.Resent = true
		c.announce = time.Now()
	default:
		if a := r.Answer; a.Residual != nil && (status == "ok" || status == "dup") && !r.Freed {
			c.lock.Lock()
			left := map[string]residual{a.Of: *a.Residual}
			for name, kept := range c.disk.Residuals {
				if name != a.Of && strings.HasPrefix(name, r.Run+"/") {
					left[name] = kept
				}
			}
			c.disk.Residuals = left
			c.lock.Unlock()
		}
		c.free()
	}
}

// free ends the announcements of the result. Its blob stays until the next one, since a later try may ask for it.
func (c *client) free() {
	c.lock.Lock()
	defer c.lock.Unlock()
	c.disk.Result.Freed = true
	c.announce = time.Time{}
	c.save()
	c.freed = true
}

func (c *client) onError(m object) {
	c.lock.Lock()
	t := c.transfer
	isGet := t != nil && t.asked[text(m, "re", "")]
	c.lock.Unlock()
	code, retry := m["code"].(string), time.Duration(0)
	if ms, there := m["retry_ms"].(int64); there {
		retry = time.Duration(ms) * time.Millisecond
	}
	c.say(object{"event": "error", "code": code, "detail": text(m, "detail", "")})
	switch {
	case isGet:
		select {
		case t.errors <- m:
		default:
		}
	case code == "not_member" || code == "bad_version":
		c.say(object{"event": "stopped", "why": code})
		os.Exit(1)
	case m["re"] != c.lastAnnounced:
	case code == "busy" || code == "rate":
		c.announce = time.Now().Add(retry + time.Duration(rand.Int63n(int64(time.Second))))
	case code == "internal":
		c.announce = time.Now().Add(60 * time.Second)
	default:
		c.free()
	}
}

func (c *client) sendReady() {
	c.announce = time.Time{}
	r := c.disk.Result
	if r == nil {
		return
	}
	fields := object{"run": r.Run, "round": r.Round, "exchange": r.Exchange, "attempt": 0, "n": r.Answer.N, "what": r.Answer.What,
		"update": newManifest(r.Answer.What, r.Answer.Data, r.Block).json(), "seconds": r.Seconds}
	if r.Answer.Metrics != nil {
		fields["metrics"] = r.Answer.Metrics
	}
	c.lastAnnounced = c.newID()
	c.send("rq", "rdy", c.lastAnnounced, fields)
	if !r.Freed {
		c.announce = time.Now().Add(60*time.Second + c.jitter())
	}
}
