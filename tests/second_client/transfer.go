package main

// Blobs down and up: section 9.

import (
	"context"
	"fmt"
	"math/rand"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

type arrived struct {
	index   int64
	payload []byte
}

// transfer is what a download waits for: blocks of its blob, and errors about its requests.
type transfer struct {
	sha    string
	asked  map[string]bool // ids of its `get`
	blocks chan arrived
	errors chan object
}

func (c *client) fetch(ctx context.Context, m manifest) []byte {
	if m.inline != nil {
		return m.inline
	}
	if data, there := c.blobs[m.sha]; there {
		return data
	}
	for try := 0; try < 2; try++ {
		data := c.download(ctx, m)
		if sha256Of(data) == m.sha {
			if len(c.blobs) > 64 {
				c.blobs = map[string][]byte{}
			}
			c.blobs[m.sha] = data
			return data
		}
	}
	refuse("bad_hash", "blob %s came wrong twice", m.sha[:16])
	return nil
}

func (c *client) download(ctx context.Context, m manifest) []byte {
	t := &transfer{m.sha, map[string]bool{}, make(chan arrived, 64), make(chan object, 16)}
	c.lock.Lock()
	c.transfer = t
	c.lock.Unlock()
	data, have := make([]byte, m.size), make([]bool, m.total())
	window, timeouts := int64(4), 0
	for missing := m.total(); missing > 0; {
		waiting := c.ask(t, m, have, window)
		timer := time.NewTimer([]time.Duration{8, 16, 32}[timeouts] * time.Second)
		for waiting > 0 {
			select {
			case b := <-t.blocks:
				refused := attempt(func() {
					body, mark := readBlock(m, b.index, b.payload, true)
					c.mark = mark
					if !have[b.index] {
						have[b.index] = true
						copy(data[b.index*m.block:], body)
						missing--
						waiting--
						timeouts = 0
					}
				})
				if waiting == 0 && refused == nil && window < 16 {
					window++
				}
			case e := <-t.errors:
				code := e["code"].(string)
				need(code == "busy" || code == "rate", "unreachable", "the coordinator answers %s", code)
				c.pause(ctx, e)
				waiting = 0
			case <-timer.C:
				timeouts, window, waiting = timeouts+1, (window+1)/2, 0
				need(timeouts < 3, "unreachable", "no block came")
			case <-ctx.Done():
				refuse("deadline", "stopped while it fetched")
			}
		}
		timer.Stop()
	}
	return data
}

func (c *client) pause(ctx context.Context, e object) {
	retry, _ := e["retry_ms"].(int64)
	select {
	case <-time.After(time.Duration(retry+rand.Int63n(200)) * time.Millisecond):
	case <-ctx.Done():
		refuse("deadline", "stopped while it waited")
	}
}

// ask sends a `get` for the first blocks that lack, and returns how many.
func (c *client) ask(t *transfer, m manifest, have []bool, window int64) (count int64) {
	at := []any{}
	first, length := int64(0), int64(0)
	for i := int64(0); i < m.total() && count < window; i++ {
		if have[i] {
			continue
		}
		if length > 0 && first+length == i {
			length++
			at[len(at)-1] = []any{first, length}
		} else {
			first, length = i, 1
			at = append(at, []any{first, length})
		}
		count++
	}
	id := c.newID()
	c.lock.Lock()
	t.asked[id] = true
	c.lock.Unlock()
	c.send("rq", "get", id, object{"sha256": m.sha, "block": m.block, "at": at, "mark": int(c.mark)})
	return
}

// upload sends the blocks of a result that a `go` says are missing, at most `window` of them not yet acknowledged by the broker.
func (c *client) upload(link mqtt.Client, m manifest, data, have []byte, shard, window int64) {
	open := []mqtt.Token{}
	for i := int64(0); i < m.total(); i++ {
		if holds(have, i) {
			continue
		}
		if int64(len(open)) == window {
			if !open[0].WaitTimeout(60 * time.Second) {
				return // the next `go`, or the next connection, goes on
			}
			open = open[1:]
		}
		topic := fmt.Sprintf("fc/v1/%s/in/%d/%s/%s/%d", c.federation, shard, c.cid, m.sha[:16], i)
		body := data[i*m.block : i*m.block+m.bytesOf(i)]
		open = append(open, link.Publish(topic, 1, false, writeBlock(i, m.total(), 0, body)))
	}
}
